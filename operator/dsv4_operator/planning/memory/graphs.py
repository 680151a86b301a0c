"""Batch sizes that vLLM records as graphs (0.32, `VllmConfig._set_cudagraph_sizes`)."""

from __future__ import annotations

from dsv4_operator.planning.memory.records import EngineSettings

_LARGEST = 512
"""On SM12x; on data-centre Blackwell vLLM's own is 1024."""


def capture_sizes(engine: EngineSettings, *, drafting: bool) -> tuple[int, ...]:
    """Return the sizes in tokens, ascending: those given, else 1, 2, 4, every 8 below 256, every 16 from there on."""
    if engine.capture_sizes:
        return tuple(sorted({size for size in engine.capture_sizes if size <= engine.max_num_batched_tokens}))
    queries = 1 + (engine.speculative_tokens if drafting else 0)
    largest = engine.capture_size or min(engine.max_num_seqs * queries, _LARGEST)
    largest = max(1, min(largest, engine.max_num_batched_tokens))
    candidates = (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16))
    return tuple(size for size in candidates if size <= largest)
