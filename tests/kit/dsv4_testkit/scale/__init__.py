"""The parts of `operator_scale.py`: a crowd of agents, what processes and the API server count, and its table."""
