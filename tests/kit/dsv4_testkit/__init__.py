"""What tests and benchmarks share: deployments under test, faults, fakes and the worlds that pure code is tried in.

Found through `pythonpath` in pyproject.toml, and by `python benchmarks/x.py` through a link beside the benchmarks.
"""
