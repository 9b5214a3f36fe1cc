"""What bench.py runs: measurements, their tables and pictures; and a GPU that is not there."""
