"""Shared parts of tests and benchmarks: deployments under test, faults, fakes, and environments of pure code.

Importable through `pythonpath` in pyproject.toml, and for `python benchmarks/x.py` through a link in benchmarks/.
"""
