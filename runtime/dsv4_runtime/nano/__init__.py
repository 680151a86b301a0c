"""Makes a tiny but real DeepSeek-V4 checkpoint: same architecture, random weights, nothing to download."""

from dsv4_runtime.nano.checkpoint import NotANanoCheckpointError, make
from dsv4_runtime.nano.recipe import Drafts, Precision

__all__ = ["Drafts", "NotANanoCheckpointError", "Precision", "make"]
