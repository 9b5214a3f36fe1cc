"""What bench.py runs: measurements, their tables and pictures; and a pretended GPU (conftest.py)."""
