"""Triton kernels for the operations of DeepSeek-V4 on SM12x.

Every operation is a folder: its contract is the docstring of the folder's `__init__`, `reference.py` is the same
function in torch, `kernel.py` the Triton source, `configs.py` its configurations per architecture and `api.py` its row
in the registry (`dsv4_kernels.registry`). Nothing but torch and triton is imported, and no compiler toolchain is needed
at run time.
"""
