"""Memory of a rank except its KV cache: weights and other items, each with its range.

vLLM (0.21 and later) reserves `gpu_memory_utilization` of all memory. The KV cache gets the rest after the logged
items: weights, non-torch memory, peak of the activations and an estimate of the graphs. Those are the items in the
budget. Memory allocated before its first measurement (CUDA context, communicators of NCCL, on unified memory the system
and Ray) and after the profile is beside it. `runs.toml` has the logged runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache

from dsv4_operator.planning.catalog.records import (
    GIB,
    MIB,
    NANO,
    Build,
    Division,
    Machine,
    Model,
    Part,
    Range,
    WeightComponent,
)
from dsv4_operator.planning.memory.records import EngineSettings, Item, MemoryPool, Parallel, ranged

_LARGEST = 512
"""Default of vLLM on SM12x; 1024 on data-centre Blackwell."""


def capture_sizes(engine: EngineSettings, *, drafting: bool) -> tuple[int, ...]:
    """Return the batch sizes in tokens that vLLM captures as graphs (0.32, `VllmConfig._set_cudagraph_sizes`).

    Ascending; the given ones, else 1, 2, 4, multiples of 8 below 256, multiples of 16 above.
    """
    if engine.capture_sizes:
        return tuple(sorted({size for size in engine.capture_sizes if size <= engine.max_num_batched_tokens}))
    queries = 1 + (engine.speculative_tokens if drafting else 0)
    largest = engine.capture_size or min(engine.max_num_seqs * queries, _LARGEST)
    largest = max(1, min(largest, engine.max_num_batched_tokens))
    candidates = (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16))
    return tuple(size for size in candidates if size <= largest)


@cache
def stages(layers: int, pipeline: int) -> tuple[range, ...]:
    """Return the decoder layers of each stage as in vLLM: the remainder goes to the stages before the last."""
    sizes = [layers // pipeline] * pipeline
    for extra in range(layers % pipeline):
        sizes[-(extra + 2) % pipeline] += 1
    edges = [sum(sizes[:stage]) for stage in range(pipeline + 1)]
    return tuple(range(edges[stage], edges[stage + 1]) for stage in range(pipeline))


class BadDivision(ValueError):
    """The ranks do not divide the model; the text has possible values."""

    def __init__(self, problem: str, remedy: str, sizes: Sequence[int]) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy
        self.sizes = tuple(sizes)
        """Tensor-parallel sizes that divide the model."""


def check_parallel(model: Model, parallel: Parallel, padded: Sequence[int] = ()) -> None:
    """Check that `parallel` divides the model, or that the build pads it for the size.

    Raises:
        BadDivision: it does not.
    """
    legal = [size for size in (1, 2, 4, 8, 16) if not (model.heads % size or model.o_groups % size)]
    undivided = model.heads % parallel.tensor or model.o_groups % parallel.tensor if parallel.tensor > 0 else True
    if undivided and parallel.tensor not in padded:
        stages_instead = _divided(model, legal, parallel.world_size)
        raise BadDivision(
            f"tensorParallelSize {parallel.tensor} does not divide {model.name}: it has {model.heads} heads in "
            f"{model.o_groups} output groups",
            f"use {stages_instead or 'one of ' + ', '.join(map(str, (*legal, *padded)))}",
            (*legal, *padded),
        )
    if not 1 <= parallel.pipeline <= len(model.layers):
        raise BadDivision(
            f"pipelineParallelSize {parallel.pipeline} does not divide {model.name}: it has {len(model.layers)} layers",
            f"use 1 to {len(model.layers)}",
            legal,
        )
    for stage in stages(len(model.layers), parallel.pipeline):
        if problem := _stage_problem(model, stage):
            raise BadDivision(
                f"pipelineParallelSize {parallel.pipeline} does not divide {model.name}: {problem}",
                f"use {_legal_stages(model)}",
                legal,
            )


def _divided(model: Model, legal: Sequence[int], devices: int) -> str:
    """Return a possible division of the model over `devices` with the most ranks per layer; empty without one."""
    for tensor in reversed(legal):
        count = devices // tensor
        if devices % tensor or not 1 < count <= len(model.layers):
            continue
        if _divides(model, count):
            return f"tensorParallelSize {tensor} with pipelineParallelSize {count}"
    return ""


def _divides(model: Model, count: int) -> bool:
    return not any(_stage_problem(model, part) for part in stages(len(model.layers), count))


def _stage_problem(model: Model, stage: range) -> str:
    """Return the reason why these layers cannot be a stage; empty: they can.

    No stage reads the cache of another (vLLM models/deepseek_v41). vLLM 0.33 fails where a stage has no layer of one of
    the kinds of KV cache (`allocate_kv_cache`; seen with two and three stages of the nano model).
    """
    if sources := model.kv_sources:
        reads = stage.start > sources[0] and stage.start not in sources
        return f"layer {stage.start} would begin a stage, and reads the KV cache of an earlier layer" if reads else ""
    ratios = model.compress_ratios
    lacking = {ratio for ratio in ratios if ratio > 1} - {ratios[layer] for layer in stage}
    if lacking:
        return f"the stage from layer {stage.start} on would have no layer with compress_ratio {min(lacking)}"
    return ""


@cache
def _legal_stages(model: Model) -> str:
    legal = [str(count) for count in range(1, min(16, len(model.layers)) + 1) if _divides(model, count)]
    return f"one of {', '.join(legal)}" if len(legal) > 1 else legal[0]


_DRAFT_EXPERTS = 0.95
"""Share of the experts in the bytes of a draft layer."""


def weights_item(model: Model, parts: Iterable[tuple[Part, int]], build: Build) -> Item:
    """Return the memory of the loaded `parts`, with the experts in the build's format."""
    sizes = dict(parts)
    whole = sum(sizes.values())
    experts = sizes.get(Part.EXPERTS, 0) + int(_DRAFT_EXPERTS * sizes.get(Part.DRAFTS, 0))
    kept_share = build.experts_shared if model.kv_sources and build.experts_shared else build.experts
    least, expected, most = (
        int(tensors * whole + (kept - 1) * experts)
        for tensors, kept in (
            (build.tensors.least, kept_share.least),
            (build.tensors.expected, kept_share.expected),
            (build.tensors.most, kept_share.most),
        )
    )
    return Item("weights", expected, MemoryPool.BUDGET, "", least, most)


@lru_cache(maxsize=1024)
def rank_weights(
    model: Model, parallel: Parallel, stage: int, *, drafts: bool, expert_rows: int = 128
) -> tuple[tuple[Part, int], ...]:
    """Return the bytes of each part on a rank of `stage`, in descending order."""
    components = [part for layer in stages(len(model.layers), parallel.pipeline)[stage] for part in model.layers[layer]]
    if stage == 0:
        components += model.embedding
    if stage == parallel.pipeline - 1:
        components += model.head
    components += model.host_components
    found: Counter[Part] = Counter()
    for component in components:
        found[component.part] += share(component, model, parallel, expert_rows)
    if stage == parallel.pipeline - 1 and drafts and model.speculative is not None:
        heads = model.speculative.components
        found[Part.DRAFTS] += sum(share(component, model, parallel, expert_rows) for component in heads)
    return tuple(found.most_common())


def share(component: WeightComponent, model: Model, parallel: Parallel, expert_rows: int = 128) -> int:
    """Return the bytes of `component` on one rank; the kernels round the rows of an expert up to `expert_rows`."""
    match component.division:
        case Division.REPLICATED:
            return component.bytes
        case Division.TENSOR:
            return -(-component.bytes // parallel.tensor)
    if parallel.expert:
        return -(-component.bytes * -(-model.experts // parallel.tensor) // model.experts)
    rows = -(-model.moe_inter // parallel.tensor)
    if component.format != "bf16":
        rows = -(-rows // expert_rows) * expert_rows
    return -(-component.bytes * rows // model.moe_inter)


INSTANT = "instanttensor"
_PAIR = 2
_ROPE_DIM = 64
_LOGITS = 512 * MIB
"""vLLM 0.32: VLLM_SPARSE_INDEXER_MAX_LOGITS_MB."""
_KEYS, _KEY_BYTES = 8, 132
"""Keys in the indexer's workspace for each context token and unit of `sparse_mla_prefill_workspace_factor`."""
_FACTOR, _FACTOR_LONG, _LONG = 5, 2, 256 * 1024
"""vLLM 0.32: the factor up to 256K tokens of context, and above."""
_CHUNKS = 4
"""Chunks that FlashMLA gathers at once."""
_CONTEXT_RATIO = 4
"""Tokens for each state of the densest compressed cache; 1 in V4.1."""
_ACTIVATIONS = Range(0.0, 0.29, 0.8)
"""GiB of the profile's peak that do not depend on the batched tokens: 0.27 to 0.76 in three builds."""
_GRAPHS_BASE = 0.1
_GRAPH = Range(0.02, 0.05, 0.075)
"""GiB of vLLM's estimate for each captured size on a discrete GPU: 0.64 for 9, 1.1 for 19, 2.2 for 51; 3.84 for 51 with
the first runner. The graphs use a third of it."""
_GRAPH_UNIFIED = Range(0.02, 0.08, 0.16)
_OTHER = Range(0.0, 0.2, 1.0)
_OTHER_UNIFIED = Range(0.2, 1.5, 3.0)
"""vLLM measures the free memory of the whole machine, so this includes the growth of host processes: 0.4 to 2.7 GiB in
six builds, 6 in one with NCCL's defaults."""
_HEAD = Range(0.3, 0.6, 1.0)
_HEAD_RAY = Range(0.3, 0.64, 3.9)
_HEAD_RAY_LEGACY = Range(1.0, 3.2, 3.9)
"""Growth of the API server, engine core and Ray head of rank 0 after vLLM's first measurement: 3.66 GiB less KV cache
than on the others with Ray's compiled graphs, 0.64 without Ray. Ray's head runs before the measurement. No log of RayV2
exists."""
_CONTEXT = Range(1.0, 1.2, 1.6)
"""CUDA context and communicators before vLLM's first measurement of a discrete GPU: 93.83 of 95.01 GiB were free."""
_HOST_UNIFIED = Range(5.0, 7.0, 11.0)
"""System, CUDA context and worker memory before the first measurement on GB10: 6.8 GiB with 8 ranks, 8 to 10.9 with 2,
15 to 18 with KV offloading beside 17 containers."""
_RESERVE_UNIFIED = 3 * GIB
"""Minimum MemAvailable while serving; below it, driver allocations fail before the kernel reclaims memory."""
_RESERVE = Range(0.0, 0.0, 0.35)
_NCCL_PAIR, _NCCL_MANY = Range(0.3, 0.43, 1.0), Range(0.4, 1.5, 11.6)
"""Shared-memory buffers between 2 ranks and among more: 11.6 GiB with 8 ranks at NCCL's defaults, 0.43 with fewer
channels and smaller buffers."""
_CHUNK, _DEPTH = 8 * MIB, 512
"""InstantTensor (0.2): bytes of a request, and requests in flight of all ranks together. Each rank has a ring for all
of them in device memory, and pinned windows for its own."""
_HELD = Range(0.08, 0.46, 0.93)
"""Part of InstantTensor's buffers in use on unified memory when vLLM sizes the KV cache: 4.4 to 5.6 of 6 GiB in a test
of this variable alone on two GB10 (three starts an arm), 0 to 3 GiB in starts of b12x builds."""
_WITHOUT_BUFFERS = frozenset(
    {"auto", "dummy", "hf", "ipc_cache", "mistral", "npcache", "pt", "safetensors", "sharded_state"}
)
"""Load formats that read files in place, or no files."""
_OTHER_LOADERS = Range(0.0, 0.2, 2.0)
"""GiB of other load formats in use on unified memory when vLLM sizes the KV cache; no log of them exists."""
_INDEXER_ROW = 144_000
"""Bytes of b12x's indexer workspace for a token of a step: 1124 MiB for 8192."""
_SPLIT_ROWS = 16_384
"""Rows times splits for which b12x's attention has partial results."""
_VISION = Range(0.4, 0.9, 1.4)
"""GiB of the vision tower in vLLM's profile: 1.30 less KV cache than the same engine without images, with 0.36 more
weights (four images a request, 8192 batched tokens; tonyd2wild, docs/EXL3-TP3.md, starts 7 and 9)."""
_SCRATCH, _PROFILED = Range(0.5, 1.0, 1.5), Range(0.5, 1.0, 1.3)


def beside_weights(
    model: Model, machine: Machine, parallel: Parallel, engine: EngineSettings, *, head: bool, last: bool
) -> Iterator[Item]:
    """Yield every item of one rank except weights and KV cache.

    Args:
        model: the checkpoint.
        machine: the rank's machine.
        parallel: parallelism of the group.
        engine: settings of the engine.
        head: whether it is rank 0.
        last: whether it is on the last stage.
    """
    if machine.sm == 0:
        yield from _cpu(head=head)
        return
    yield from _profiled(model, machine, parallel, engine, last=last)
    if machine.unified_memory and head:
        own = engine.build.head or (_HEAD_RAY_LEGACY if engine.ray_legacy else _HEAD_RAY if engine.ray else _HEAD)
        note = "API server, engine core, Ray's head" if engine.ray else "API server and engine core"
        yield ranged("engine processes", own, MemoryPool.BUDGET, note)
    yield from _unprofiled(machine, parallel, engine)
    activations = engine.max_num_batched_tokens * _activation_bytes(model, parallel)
    yield _prefill_peak(machine, engine, activations)
    if machine.unified_memory:
        yield Item("reserve", _RESERVE_UNIFIED, MemoryPool.BESIDE, "stays free")
    else:
        yield ranged("reserve", _RESERVE, MemoryPool.BESIDE, "stays free")


def loader_bytes(machine: Machine, parallel: Parallel, engine: EngineSettings) -> int:
    """Return the temporary memory of the load beside the weights, before the KV cache is allocated."""
    if not machine.sm or engine.load_format != INSTANT:
        return 0
    ring, windows = _instant_buffers(parallel, engine)
    return ring + (windows if machine.unified_memory else 0)


def _instant_buffers(parallel: Parallel, engine: EngineSettings) -> tuple[int, int]:
    """Return the bytes of InstantTensor's ring in device memory and of its pinned windows, on one rank."""
    windows = engine.loader_windows or max(_DEPTH // parallel.world_size, 3) * _CHUNK
    return engine.loader_ring or windows * parallel.world_size, windows


def load_format_item(parallel: Parallel, engine: EngineSettings) -> Item | None:
    """Return the loader's memory that vLLM counts when it sizes the KV cache on unified memory; None without any."""
    if engine.load_format == INSTANT:
        buffers = sum(_instant_buffers(parallel, engine)) / GIB
        held = Range(_HELD.least * buffers, _HELD.expected * buffers, _HELD.most * buffers)
    elif engine.load_format in _WITHOUT_BUFFERS:
        return None
    else:
        held = _OTHER_LOADERS
    return ranged("load format", held, MemoryPool.BUDGET, f"buffers of {engine.load_format} in use after the load")


def _profiled(
    model: Model, machine: Machine, parallel: Parallel, engine: EngineSettings, *, last: bool
) -> Iterator[Item]:
    """Yield the items that vLLM's memory profile contains."""
    tokens, build = engine.max_num_batched_tokens, engine.build
    tables = 2 * 4 * model.max_positions * _ROPE_DIM + 4 * tokens * model.index_topk
    yield Item("rotary tables, top-k buffer", tables, MemoryPool.BUDGET)
    transient = tokens * _activation_bytes(model, parallel)
    yield ranged("activations", _ACTIVATIONS, MemoryPool.BUDGET, f"{tokens} batched tokens", plus=transient)
    if build.scratch:
        # BF16 copies of the inputs, FP32 outputs; FP32 gate and up projections with FP8 activations.
        row = 6 * model.hidden + 9 * -(-model.moe_inter // parallel.tensor)
        routed = tokens * model.experts_per_token * row / GIB
        yield ranged("MoE scratch", _times(_SCRATCH, routed), MemoryPool.BUDGET, "for all routed rows of a step")
    if engine.attention_profiled:
        heads = -(-model.heads // parallel.tensor)
        profiled = (_SPLIT_ROWS * heads * (2 * model.head_dim + 4) + tokens * _INDEXER_ROW) / GIB
        note = "workspaces of attention and indexer"
        yield ranged("attention in the profile", _times(_PROFILED, profiled), MemoryPool.BUDGET, note)
    if model.kv_sources and engine.images:
        yield ranged("images in the profile", _VISION, MemoryPool.BUDGET, "of the vision tower")
    states = engine.max_model_len // (1 if model.kv_sources else _CONTEXT_RATIO)
    workspace = states * _KEYS * _KEY_BYTES
    factor = build.indexer_factor or (_FACTOR_LONG if engine.max_model_len > _LONG else _FACTOR)
    most = workspace * (build.indexer_factor or _FACTOR)
    yield Item("indexer workspace", workspace * factor, MemoryPool.BUDGET, "for the longest prompt", most=most)
    if build.workspace.most:
        gathered = _CHUNKS * (states + model.window + tokens) * model.head_dim * 2 / GIB
        sizes = (gathered * each for each in (build.workspace.least, build.workspace.expected, build.workspace.most))
        yield ranged("attention workspace", Range(*sizes), MemoryPool.BUDGET, "where a prefill gathers its context")
    other = build.other or (_OTHER_UNIFIED if machine.unified_memory else _OTHER)
    released = "negative: the profile releases memory that was in use before"
    note = "libraries, NCCL's channels, workspaces" if other.expected >= 0 else released
    yield ranged("non-torch memory", other, MemoryPool.BUDGET, note)
    if machine.unified_memory:
        if loader := load_format_item(parallel, engine):
            yield loader
        if parallel.world_size > _PAIR and build.nccl_counted.most:
            peers = (parallel.world_size - 1) * min(1.0, engine.nccl_share)
            note = "allocated in the profile; NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS bound it"
            yield ranged("NCCL in the profile", _times(build.nccl_counted, peers), MemoryPool.BUDGET, note)
    if engine.cuda_graphs:
        yield _graphs(model, machine, engine, drafting=last and engine.speculative_tokens > 0)


def _times(size: Range, factor: float) -> Range:
    return Range(size.least * factor, size.expected * factor, size.most * factor)


def _graphs(model: Model, machine: Machine, engine: EngineSettings, *, drafting: bool) -> Item:
    count = len(capture_sizes(engine, drafting=drafting and model.speculative is not None))
    each = engine.build.graph or (_GRAPH_UNIFIED if machine.unified_memory else _GRAPH)
    sizes = Range(
        each.least * count,
        _GRAPHS_BASE + each.expected * count,
        max(_GRAPHS_BASE, 2 * _GRAPHS_BASE + each.most * count),
    )
    where = MemoryPool.BUDGET if engine.build.graphs_counted else MemoryPool.BESIDE
    note = f"vLLM's estimate for {count} sizes" if engine.build.graphs_counted else f"{count} sizes, after the cache"
    return ranged("CUDA graphs", sizes, where, note)


def _unprofiled(machine: Machine, parallel: Parallel, engine: EngineSettings) -> Iterator[Item]:
    """Yield the memory in use before vLLM's first measurement."""
    if machine.unified_memory:
        yield ranged("host and Ray", _HOST_UNIFIED, MemoryPool.BESIDE, "system, worker and Ray processes")
        if parallel.world_size > 1:
            yield _nccl(parallel, engine)
    else:
        yield ranged("CUDA context", _CONTEXT, MemoryPool.BESIDE, "with NCCL's communicators")


def _nccl(parallel: Parallel, engine: EngineSettings) -> Item:
    if parallel.world_size == 2:
        return ranged("NCCL buffers", _NCCL_PAIR, MemoryPool.BESIDE)
    expected, most = (
        max(_NCCL_MANY.least, each * engine.nccl_share) for each in (_NCCL_MANY.expected, _NCCL_MANY.most)
    )
    if engine.build.nccl_counted.most:
        # Most of them are within the engine's budget.
        expected = _NCCL_MANY.least
    note = "11.6 GiB were seen at NCCL's defaults; NCCL_BUFFSIZE bounds it" if engine.nccl_share >= 1 else ""
    return ranged("NCCL buffers", Range(_NCCL_MANY.least, expected, most), MemoryPool.BESIDE, note)


def _prefill_peak(machine: Machine, engine: EngineSettings, activations: int) -> Item:
    """Return the peak that the profile, without real attention, does not contain.

    Logits of the indexer and 2 int32 buffers for the blocks of ratio 128. On a discrete GPU they reuse the memory of
    the profile's activations.
    """
    tokens, length = engine.max_num_batched_tokens, engine.max_model_len
    peak = min(_LOGITS, 4 * tokens * -(-length // 4)) + 2 * 4 * tokens * -(-length // 128)
    planned = peak if machine.unified_memory else max(0, peak - activations)
    note = "made after vLLM has profiled its memory"
    return Item("prefill peak", planned, MemoryPool.BESIDE, note, least=0, most=peak)


def _activation_bytes(model: Model, parallel: Parallel) -> int:
    """Return the BF16 bytes of one token at the peak of a layer: queries, outputs, hyper-connection streams."""
    attention = 3 * -(-model.heads // parallel.tensor) * model.head_dim
    return 2 * (attention + 3 * model.hc_mult * model.hidden)


def _cpu(*, head: bool) -> Iterator[Item]:
    yield Item("worker and Ray processes", NANO.rank_bytes, MemoryPool.BESIDE, "weights included")
    if head:
        yield Item("engine processes", NANO.head_bytes, MemoryPool.BESIDE, "API server, engine core, Ray's head")
