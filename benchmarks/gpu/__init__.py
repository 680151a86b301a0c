"""Measurements of the engine on an NVIDIA card; docs/gpu.md says how to run them."""
