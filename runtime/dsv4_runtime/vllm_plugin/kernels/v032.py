"""vLLM 0.32: differences from `v033`. The hooks are the same; some are refused (`hooks`), with one warning each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsv4_runtime.vllm_plugin.kernels import v033


def __getattr__(name: str) -> Any:
    return getattr(v033, name)


def compile_together(compile_all: Callable[[], None], count: int) -> None:
    """Call `compile_all`: this version has no parallel compilation."""
    compile_all()


def grammar_masks(rows: int, drafts: int) -> int:
    """Return the number of masks of a step of `rows` requests: one per existing draft, of which there are none."""
    return rows
