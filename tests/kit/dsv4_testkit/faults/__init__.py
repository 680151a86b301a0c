"""Parts of `benchmarks/faults.py`: table of faults, actions, load, assessment of runs, and the peer (bare vLLM)."""
