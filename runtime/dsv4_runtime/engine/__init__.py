"""Logs, completions and authentication of Ray and vLLM on a member."""
