"""Parser of vLLM's log lines about its memory at the start, for the agent and `dsv4 plan --from-log`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dsv4_runtime.util.log_lines import log_reader

_GIB = 2**30
_FIGURE = r"(\d[\d,]{0,20}(?:\.\d{1,9})?)"
_SIGNED = r"(-?\d[\d,]{0,20}(?:\.\d{1,9})?)"
_PATTERNS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(rf"Model loading took {_FIGURE} GiB"), ("weights",)),
    (re.compile(rf"Available KV cache memory: {_SIGNED} GiB"), ("kv",)),
    # Of a start that fails, because one request has no room.
    (re.compile(rf"max seq len \({_FIGURE}\)"), ("max_model_len",)),
    (
        re.compile(rf"{_FIGURE} GiB (?:KV cache )?(?:is )?needed.{{0,100}}?available[^\d-]{{0,40}}{_SIGNED}"),
        ("needed", "kv"),
    ),
    (re.compile(rf"reserved {_FIGURE} GiB memory for KV Cache"), ("reserved",)),
    (re.compile(rf"Estimated (?:MRV2 )?CUDA graph memory: {_FIGURE} GiB"), ("graphs",)),
    (re.compile(rf"KV cache size: {_FIGURE} tokens"), ("kv_tokens",)),
    (
        re.compile(rf"Maximum concurrency for {_FIGURE} tokens per request: {_FIGURE}x"),
        ("max_model_len", "concurrency"),
    ),
    (re.compile(rf"Desired GPU memory utilization is \({_FIGURE},"), ("utilization",)),
    (
        re.compile(rf"Actual usage is {_FIGURE} GiB for consumed memory.{{0,200}}?, {_FIGURE} GiB for peak"),
        ("consumed", "peak"),
    ),
    (
        re.compile(
            rf"Actual usage is {_FIGURE} GiB for weight, {_FIGURE} GiB for peak.{{0,200}}?, "
            r"(-?\d{1,9}(?:\.\d{1,9})?) GiB for non-torch"
        ),
        ("weights", "activations", "non_torch"),
    ),
)
_BEGINS = re.compile(r"Initializing a V1 LLM engine")
_PLAIN = frozenset({"kv_tokens", "max_model_len", "concurrency", "utilization"})
"""Figures that are no memory."""


@dataclass(frozen=True, slots=True)
class MemoryLog:
    """The figures of one start, memory in bytes; None: the log does not have it."""

    weights: int | None = None
    kv: int | None = None
    """Available for the KV cache on the rank that has least."""
    needed: int | None = None
    """KV cache of one request of the greatest length, logged by a start that fails."""
    reserved: int | None = None
    """Given size of the KV cache."""
    graphs: int | None = None
    """The estimate."""
    consumed: int | None = None
    """Weights, non-torch memory, and other memory that remains after the profile."""
    peak: int | None = None
    """Of the activations, with the graphs' estimate; logged with `consumed`."""
    activations: int | None = None
    """Of the activations alone, as vLLM up to 0.26 logs it."""
    non_torch: int | None = None
    kv_tokens: float | None = None
    concurrency: float | None = None
    max_model_len: float | None = None
    utilization: float | None = None


@log_reader(dict[str, float])
def memory_figures(line: str) -> dict[str, float]:
    """Return the figures that `line` of vLLM's log has, by the fields of `MemoryLog`; none for most lines."""
    found: dict[str, float] = {}
    for pattern, names in _PATTERNS:
        if match := pattern.search(line):
            for name, text in zip(names, match.groups(), strict=True):
                value = float(text.replace(",", ""))
                found[name] = value if name in _PLAIN else round(value * _GIB)
    return found


def read_memory_log(lines: Iterable[str]) -> MemoryLog:
    """Return the figures of the last start in `lines`: of several ranks the first, of their KV caches the smallest."""
    figures: dict[str, float] = {}
    for line in lines:
        if _BEGINS.search(line):
            figures = {}
        for name, value in memory_figures(line).items():
            figures[name] = min(value, figures.get(name, value)) if name == "kv" else figures.get(name, value)
    return MemoryLog(**figures)  # type: ignore[arg-type]


KV_CACHE = "KV cache"
_TABLES = "rotary tables, top-k buffer"
_WORKSPACES = ("indexer workspace", "attention workspace", "attention in the profile")
_NON_TORCH = ("non-torch memory", "engine processes", "load format", "NCCL in the profile")
_ACTIVATIONS = ("activations", "MoE scratch")


def logged_terms(log: MemoryLog) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each figure of `log` in bytes, with the items of a memory plan that it is the sum of."""
    if log.weights is not None:
        yield log.weights, ("weights", _TABLES)
    if log.consumed is not None and log.weights is not None:
        yield log.consumed - log.weights, (*_NON_TORCH, *_WORKSPACES)
    elif log.non_torch is not None:
        yield log.non_torch, _NON_TORCH
    if log.peak is not None:
        yield log.peak - (log.graphs or 0), _ACTIVATIONS
    elif log.activations is not None:
        yield log.activations, (*_ACTIVATIONS, *_WORKSPACES)
    if log.graphs is not None:
        yield log.graphs, ("CUDA graphs",)


def memory_differences(planned: Mapping[str, int], log: MemoryLog) -> dict[str, int]:
    """Return by item the bytes by which `log` exceeds the plan; the first item of a figure gets its whole difference.

    `planned` has the bytes of each item in the engine's budget on the most limited rank, and of `KV_CACHE`.
    """
    found = {names[0]: logged - sum(planned.get(name, 0) for name in names) for logged, names in logged_terms(log)}
    if log.kv is not None and KV_CACHE in planned and _NON_TORCH[0] not in found:
        # The part of the KV cache's difference that no figure explains.
        found[_NON_TORCH[0]] = planned[KV_CACHE] - log.kv - sum(found.values())
    return found
