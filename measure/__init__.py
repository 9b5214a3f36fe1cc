"""What bench.py runs: measurements, tables and pictures; and the profiler behind --profile."""
