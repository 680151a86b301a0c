"""Measurements of the engine on an NVIDIA card; docs/gpu.md has the commands."""
