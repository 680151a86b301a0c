"""Generator of a tiny, real DeepSeek-V4 checkpoint: same architecture, random weights, no downloads."""

from dsv4_runtime.nano.checkpoint import NotANanoCheckpointError, make
from dsv4_runtime.nano.recipe import Drafts, Precision

__all__ = ["Drafts", "NotANanoCheckpointError", "Precision", "make"]
