"""What dsv4 adds to vLLM through its entry points; importing this package imports nothing of vLLM."""
