"""Triton kernels for the operations of DeepSeek-V4 on SM12x."""
