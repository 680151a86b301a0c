"""Shared parts of tests and benchmarks: the interpreter's corrections, poisoned buffers, error measures."""
