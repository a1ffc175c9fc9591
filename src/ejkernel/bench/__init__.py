"""Benchmarks against peers: every case timed in one run, every answer checked. `ejkernel bench` runs them."""
