"""What a rank needs beside its weights and its KV cache.

Every figure is a log's or follows from a shape; `benchmarks/plan.py` holds the sums against the logged runs. Where runs
differ, the greater figure is planned: a plan that says `fits` must not end in out-of-memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4_operator.planning.catalog.constants import GIB, MIB, NANO
from dsv4_operator.planning.catalog.records import Machine, Model
from dsv4_operator.planning.memory.records import Engine, Item, Parallel, Where

_ROPE_DIM = 64
_CONTEXT = 600 * MIB
"""CUDA context and libraries of one process on a discrete GPU. On GB10 vLLM's own measurement does not show it: the
ranks of the Pro run (vLLM PR 40899) had 0.06 GiB beyond their weights."""
_LOGITS = 512 * MIB
"""vLLM 0.32: VLLM_SPARSE_INDEXER_MAX_LOGITS_MB."""
_SPARSE_WORKSPACE = 2.8 * GIB
"""Sparse attention on SM12x at 1M tokens of context and 8192 batched tokens (vLLM PR 40899: 84.4 GiB beside the KV
cache, and 81.3 GiB at 16k tokens of context)."""
_GRAPHS = {True: 3.84 * GIB, False: 4.38 * GIB}
"""vLLM's own estimate on a discrete GPU, without and with draft layers (vLLM issue 41700); it comes off the budget."""
_GRAPHS_UNIFIED = 1.7 * GIB
"""On GB10 graphs take 0.9 to 1.7 GiB beyond the budget."""
_HEAD_UNIFIED = 3.66 * GIB
"""API server, engine core and Ray's head take it from rank 0's budget on unified memory: rank 0 of the Pro run had
0.98 GiB of KV cache, the others 4.64 GiB (vLLM PR 40899)."""
_HOST_UNIFIED = 5 * GIB
"""System, Ray's node and the worker's host memory on GB10: 5.3 to 6.6 GiB were free beside a budget of 107.1 GiB."""
_RESERVE_UNIFIED = 3 * GIB
"""MemAvailable that has to stay while serving, or the driver's allocations fail before the kernel reclaims."""
_RESERVE = 0.35 * GIB
"""Of a discrete GPU: with a share of 0.985 of 94.97 GiB 1M tokens were served, with 0.99 not."""
_NCCL_PAIR, _NCCL_MANY = 0.43 * GIB, 1.5 * GIB
"""Buffers between 2 ranks and among more; 11.6 GiB were seen with 8 ranks at NCCL's defaults for V4.1."""
_LOADER = 4.43 * GIB
"""While weights load (instanttensor on GB10), given back before the KV cache is made."""
_DRAFT_BUFFERS = 0.45 * GIB


def beside_weights(
    model: Model, machine: Machine, parallel: Parallel, engine: Engine, *, head: bool, last: bool
) -> Iterator[Item]:
    """Every item of one rank but weights and KV cache.

    Args:
        model: the checkpoint.
        machine: the rank's machine.
        parallel: the group's division.
        engine: the engine's settings.
        head: it is rank 0.
        last: it is on the last stage.
    """
    if machine.sm == 0:
        yield from _cpu(head=head)
        return
    yield from _engine(model, machine, parallel, engine, last=last)
    if machine.unified_memory:
        if head:
            yield Item("engine processes", int(_HEAD_UNIFIED), Where.BUDGET, "API server, engine core, Ray's head")
        yield Item("host and Ray", int(_HOST_UNIFIED), Where.BESIDE, "system, worker and Ray processes")
    if parallel.world_size > 1:
        planned = int(_NCCL_PAIR if parallel.world_size == 2 else _NCCL_MANY)
        note = "" if parallel.world_size == 2 else "11.6 GiB were seen at NCCL's defaults; NCCL_BUFFSIZE bounds it"
        where = Where.BESIDE if machine.unified_memory else Where.BUDGET
        yield Item("NCCL buffers", engine.nccl_buffer_bytes or planned, where, note)
    # Profiling runs no real attention: the indexer's logits, and 2 buffers of int32 for the blocks of ratio 128.
    tokens = engine.max_num_batched_tokens
    peak = min(_LOGITS, 4 * tokens * -(-engine.max_model_len // 4)) + 2 * 4 * tokens * -(-engine.max_model_len // 128)
    yield Item("prefill peak", peak, Where.BESIDE, "made after vLLM has profiled its memory")
    yield Item("reserve", int(_RESERVE_UNIFIED if machine.unified_memory else _RESERVE), Where.BESIDE, "stays free")


def loader_bytes(machine: Machine) -> int:
    """Memory that loading takes beside the weights, before there is a KV cache."""
    return int(_LOADER) if machine.sm else 0


def _engine(model: Model, machine: Machine, parallel: Parallel, engine: Engine, *, last: bool) -> Iterator[Item]:
    tokens = engine.max_num_batched_tokens
    drafting = bool(engine.speculative_tokens and model.speculative)
    tables = 2 * 4 * model.max_positions * _ROPE_DIM + 4 * tokens * model.index_topk
    yield Item("rotary tables, top-k buffer", tables, Where.BUDGET)
    yield Item("activations", tokens * _activation_bytes(model, parallel), Where.BUDGET, f"{tokens} batched tokens")
    if drafting and last:
        yield Item("draft buffers", int(_DRAFT_BUFFERS), Where.BUDGET)
    if machine.unified_memory:
        if engine.cuda_graphs:
            yield Item("CUDA graphs", int(_GRAPHS_UNIFIED), Where.BESIDE)
        return
    yield Item("CUDA context", _CONTEXT, Where.BUDGET)
    workspace = _SPARSE_WORKSPACE * (tokens / 8192) * (engine.max_model_len / 2**20)
    yield Item("attention workspace", 128 * MIB + int(workspace), Where.BUDGET)
    if engine.cuda_graphs:
        yield Item("CUDA graphs", int(_GRAPHS[not drafting]), Where.BUDGET, "vLLM's estimate")


def _activation_bytes(model: Model, parallel: Parallel) -> int:
    """Of one token at the peak of a layer, BF16: queries and outputs, hyper-connection streams, routed experts."""
    attention = 3 * -(-model.heads // parallel.tensor) * model.head_dim
    streams = 3 * model.hc_mult * model.hidden
    experts = model.experts_per_token * (2 * model.hidden + 3 * -(-model.moe_inter // parallel.tensor))
    return 2 * (attention + streams + experts)


def _cpu(*, head: bool) -> Iterator[Item]:
    yield Item("worker and Ray processes", NANO.rank_bytes, Where.BESIDE, "weights included")
    if head:
        yield Item("engine processes", NANO.head_bytes, Where.BESIDE, "API server, engine core, Ray's head")
