"""What tests and benchmarks share: the interpreter's corrections, poisoned buffers, error measures."""
