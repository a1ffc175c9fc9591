"""Benchmarks against peers: every case timed in one run, every answer checked. `python -m benchmarks` runs them."""
