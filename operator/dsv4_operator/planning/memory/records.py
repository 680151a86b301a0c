"""Inputs and results of a memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dsv4_operator.planning.catalog.records import GIB, RELEASED, Build, Machine, Model, Part, Range


@dataclass(frozen=True, slots=True)
class Parallel:
    """Division of a group over devices and machines."""

    tensor: int = 1
    pipeline: int = 1
    devices_per_node: int = 1
    expert: bool = False
    """Expert parallelism: whole experts on each rank instead of a share of every expert. Same bytes."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the engine."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the engine that take memory."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool = True
    speculative_tokens: int = 0
    """Draft tokens a step; 0: the draft layers are not loaded."""
    kv_dtype: str | None = None
    """`fp8_ds_mla`, `nvfp4_ds_mla` or `bf16`. Default: the model's."""
    gpu_memory_utilization: float | None = None
    """Share of the memory for weights, activations and KV cache. Default: the machine's."""
    kv_cache_memory: int | None = None
    """Bytes for the KV cache of each rank; then the utilization has no say."""
    cuda_graphs: bool = True
    capture_size: int | None = None
    """Tokens of the largest graph (`--max-cudagraph-capture-size`). Default: what the planner renders."""
    capture_sizes: tuple[int, ...] = ()
    """Tokens of every graph, where they are given (`--cudagraph-capture-sizes`)."""
    ray: bool = True
    """Whether Ray starts the workers."""
    ray_legacy: bool = False
    """Whether they speak through Ray's compiled graphs."""
    build: Build = RELEASED
    """Differences of the image's engine from released vLLM."""
    tables_on_disk: bool = False
    """Tables beside the layers (V4.1's n-grams) are read from disk as they are needed, and take no memory."""
    nccl_share: float = 1.0
    """Share of their bytes at its defaults that NCCL's buffers take, where their size or number was set."""

    def concurrent_batches(self, pipeline: int) -> int:
        """Return the number of batches that may be under way at once (vLLM's `VllmConfig.max_concurrent_batches`)."""
        return pipeline + (1 if self.async_scheduling else 0)


class MemoryPool(StrEnum):
    """Memory pool that an item takes from."""

    BUDGET = "budget"
    """Within what the engine was given (`gpu_memory_utilization`)."""
    BESIDE = "beside"
    """Of the same memory, but not within what the engine counts."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a rank's memory."""

    name: str
    bytes: int
    """Expected."""
    where: MemoryPool
    note: str = ""
    least: int = -1
    most: int = -1

    def __post_init__(self) -> None:
        for name in ("least", "most"):
            if getattr(self, name) < 0:
                object.__setattr__(self, name, self.bytes)


def ranged(name: str, size: Range, where: MemoryPool, note: str = "", *, plus: int = 0) -> Item:
    """Return an item of `size` in GiB and `plus` bytes."""
    least, expected, most = (int(each * GIB) + plus for each in (size.least, size.expected, size.most))
    return Item(name, expected, where, note, least, most)


@dataclass(frozen=True, slots=True)
class Measured:
    """Differences between what a start of the same model, image and machine logged and what was planned for it."""

    of: str
    """Model, image and machine that it is about."""
    date: str
    """Of the start: `2026-11-23`."""
    differences: Mapping[str, int] = field(hash=False)
    """Bytes by item name: logged less planned, negative where the plan was too high."""

    def applied(self, item: Item) -> Item:
        """Return `item` as it was measured, with half of its range: settings may have changed since."""
        if item.name not in self.differences:
            return item
        size = max(0, item.bytes + self.differences[item.name])
        below, above = (item.bytes - item.least) // 2, (item.most - item.bytes) // 2
        note = f"measured here on {self.date}"
        return Item(item.name, size, item.where, note, max(0, size - below), size + above)


class FitVerdict(StrEnum):
    """Whether a plan fits, over the ranges of its items."""

    FITS = "fits"
    """With every item at its most."""
    NARROW = "fits by less than its uncertainty"
    """With some items at less than their most."""
    NO = "does not fit"
    """Not even with every item at its least."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The memory of one rank."""

    rank: int
    node: int
    stage: int
    weights: tuple[tuple[Part, int], ...]
    """The parts of the item `weights`."""
    items: tuple[Item, ...]
    """Everything but the KV cache; weights first."""
    memory_bytes: int
    """That the rank has: its accelerator's, or an equal share of its machine's where that is the same memory."""
    budget_bytes: int
    """That the engine may take for itself, KV cache included."""
    kv_available: int
    """For the KV cache on this rank; negative when the weights and the rest alone exceed the budget."""
    kv_least: int
    """`kv_available` with every item of the budget at its most."""
    kv_most: int
    """`kv_available` with every item of the budget at its least."""
    kv_bytes: int
    """That the KV cache takes: whole blocks, as many as the tightest rank can hold."""
    kv_given: bool
    """Whether the size of the KV cache was given, and is not what is left of the budget."""
    loader_bytes: int
    """That loading takes for a while beside the weights, before there is a KV cache."""

    def total(self, where: MemoryPool | None = None) -> int:
        """Return the bytes of the items in `where` (or of all), the KV cache not included."""
        return sum(item.bytes for item in self.items if where is None or item.where is where)

    def above(self, where: MemoryPool | None = None) -> int:
        """Return the bytes that the items in `where` may take beyond what is expected."""
        return sum(item.most - item.bytes for item in self.items if where is None or item.where is where)

    def below(self, where: MemoryPool | None = None) -> int:
        """Return the bytes that the items in `where` may take less than is expected."""
        return sum(item.bytes - item.least for item in self.items if where is None or item.where is where)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of everything that is planned: items, reserve and KV cache."""
        return self.total() + self.kv_bytes

    @property
    def spare_bytes(self) -> int:
        """Return the bytes that are left: negative when more is planned than there is."""
        return self.memory_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The KV cache, the same on every rank of a stage."""

    bytes_per_block: int
    """Of the widest stage."""
    blocks: int
    """Number that vLLM calls `num_gpu_blocks`."""
    blocks_per_request: int
    """Of one request of the greatest length, with the reserve for its tokens in flight."""
    in_flight_tokens: int
    tokens: int
    """As vLLM prints it: `GPU KV cache size: … tokens`."""
    concurrency: float
    """As vLLM prints it: `Maximum concurrency for … tokens per request: …x`."""
    concurrency_least: float
    concurrency_most: float
    request_bytes: int
    """`blocks_per_request` in bytes, on the widest stage."""
    in_flight_bytes: int
    """The part of `request_bytes` that is there for tokens in flight."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The verdict and everything behind it."""

    model: Model = field(repr=False)
    machine: Machine = field(repr=False)
    parallel: Parallel
    engine: EngineSettings
    measured: Measured | None
    ranks: tuple[RankPlan, ...]
    kv: KvPlan | None
    """None where the layout of the model's cache is not known."""
    fits: bool
    """With every item at its expected size."""
    verdict: FitVerdict
    uncertainty_bytes: int
    """Bytes that the tightest rank may lack more than expected; 0 for a verdict that the ranges do not touch."""
    lacks_at_most: int
    """Bytes that a rank lacks with every item at its most; 0 or less if nothing."""
    tightest: int
    """The rank that limits all."""
    problem: str
    """Reason why it does not fit, in one sentence; empty if it does."""
    short_bytes: int
    """Bytes that the tightest rank lacks with every item at its expected size; 0 if it fits."""
