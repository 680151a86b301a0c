"""CPU development build: vLLM's CPU platform under Ray, its patches, and Triton's interpreter as a backend.

On a CUDA build only `entry_points`, and `triton_cpu`, which Triton loads, are imported; both are inactive there.
"""
