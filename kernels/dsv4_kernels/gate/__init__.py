"""The static gate: compile every recorded launch for every architecture without a GPU and check the compiled code.

`python -m dsv4_kernels.gate --help`. Records and results are committed (docs/kernels/static.json) and compared; see
`dsv4_kernels.gate.plans` for the plans that are recorded and the properties that their kernels must have.
"""
