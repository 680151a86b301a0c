"""Triton kernels for the operations of DeepSeek-V4 on SM12x.

Every operation has a folder: the docstring of its `__init__` is the contract, `kernel.py` the Triton source, and
`api.py` has the same function in torch with random inputs (a long one is in `reference.py`), the configurations per
architecture, the plan and the row of the registry (`dsv4_kernels.registry`). Nothing but torch and triton is imported,
and no compiler toolchain is needed at run time.
"""
