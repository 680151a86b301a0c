"""vLLM 0.32: differences from `v033`. The hooks are the same; some are refused (`hooks`), with one warning each."""

from __future__ import annotations

from collections.abc import Callable

from dsv4_runtime.vllm_plugin.kernels.v033 import (
    COLLECTIVES,
    CUTE_COMPRESSOR,
    FLASHINFER_SPARSE,
    FLASHMLA,
    HOOKS,
    HYPER_CONNECTIONS,
    LAYERS,
    MODEL_LOADER,
    MODEL_REGISTRY,
    MODEL_RUNNER,
    PARALLEL_STATE,
    PRIVATE,
    RAY_EXECUTOR,
    SERVE_COMMAND,
    SYMBOLS,
    SYSTEM_UTILS,
    TILELANG_HYPER_CONNECTIONS,
    WORKER_MODULES,
)

__all__ = [
    "COLLECTIVES",
    "CUTE_COMPRESSOR",
    "FLASHINFER_SPARSE",
    "FLASHMLA",
    "HOOKS",
    "HYPER_CONNECTIONS",
    "LAYERS",
    "MODEL_LOADER",
    "MODEL_REGISTRY",
    "MODEL_RUNNER",
    "PARALLEL_STATE",
    "PRIVATE",
    "RAY_EXECUTOR",
    "SERVE_COMMAND",
    "SYMBOLS",
    "SYSTEM_UTILS",
    "TILELANG_HYPER_CONNECTIONS",
    "WORKER_MODULES",
    "compile_together",
    "grammar_masks",
]


def compile_together(compile_all: Callable[[], None], count: int) -> None:
    """Call `compile_all`: this version has no parallel compilation."""
    compile_all()


def grammar_masks(rows: int, drafts: int) -> int:
    """Return the number of masks of a step of `rows` requests: one per existing draft, of which there are none."""
    return rows
