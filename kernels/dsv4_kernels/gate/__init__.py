"""The static gate: compile every configuration for every architecture without a GPU and check what came out.

`python -m dsv4_kernels.gate --help`. The table of results is committed (docs/kernels/static.json) and compared; see
`dsv4_kernels.static` for what a configuration promises.
"""
