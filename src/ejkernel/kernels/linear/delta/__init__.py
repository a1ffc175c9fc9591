"""The delta rule: linear attention that erases what a key held before it writes."""
