"""Additions of dsv4 to vLLM through its entry points; importing this package imports nothing of vLLM."""
