"""Process 1 of every member: prepares the node, runs Ray and vLLM as children, watches them, reports."""
