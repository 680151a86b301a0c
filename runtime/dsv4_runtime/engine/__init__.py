"""Starting, reading and checking of Ray and vLLM on a member."""
