"""Parts of `operator_scale.py`: agents of many groups, and counters of processes and of the API server."""
