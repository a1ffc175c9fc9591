"""A small transformer of the public functions: `ejkernel bench model` measures its training step and decode loop."""
