"""The parts of `benchmarks/faults.py`: the table of faults, how each is caused, the load, the judge, and the peer."""
