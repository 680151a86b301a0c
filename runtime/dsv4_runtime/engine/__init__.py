"""How Ray and vLLM are started, read and checked on a member."""
