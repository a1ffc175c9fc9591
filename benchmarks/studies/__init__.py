"""Measurements that answer one question each. Run one with `python -m benchmarks.studies.NAME`."""
