"""Generator of a tiny, real DeepSeek-V4 checkpoint: same architecture, random weights, no downloads."""
