"""Inputs and results of a memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dsv4_operator.planning.catalog.records import GIB, RELEASED, Build, Machine, Model, Part, Range
from dsv4_runtime.contract import KV_CACHE


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parallelism of a group over devices and machines."""

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
    """Settings of the engine that affect its memory."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool = True
    speculative_tokens: int = 0
    """Draft tokens of a step; 0: the draft layers are not loaded."""
    kv_dtype: str | None = None
    """`fp8_ds_mla`, `nvfp4_ds_mla` or `bf16`. Default: that of the model."""
    gpu_memory_utilization: float | None = None
    """Share of the memory for weights, activations and KV cache. Default: that of the machine."""
    kv_cache_memory: int | None = None
    """Bytes for the KV cache of each rank; overrides the utilization."""
    cuda_graphs: bool = True
    capture_size: int | None = None
    """Tokens of the largest graph (`--max-cudagraph-capture-size`). Default: the planner's value."""
    capture_sizes: tuple[int, ...] = ()
    """Tokens of every graph, if given (`--cudagraph-capture-sizes`)."""
    ray: bool = True
    """Whether Ray starts the workers."""
    ray_legacy: bool = False
    """Whether the workers use Ray's compiled graphs."""
    build: Build = RELEASED
    """Differences of the image's engine from released vLLM."""
    tables_on_disk: bool = False
    """Whether tables beside the layers (n-grams of V4.1) are read from disk on demand, without memory."""
    kernels: str = "off"
    """`spec.engine.kernels` with its default."""
    load_format: str = "safetensors"
    loader_ring: int = 0
    """Bytes of InstantTensor's buffer in device memory, if a variable sets it."""
    loader_windows: int = 0
    """Bytes of InstantTensor's pinned windows on a rank, if variables set them."""
    attention_profiled: bool = False
    """Whether vLLM's memory profile contains the workspaces of attention (`VLLM_MEMORY_PROFILE_INCLUDE_ATTN`)."""
    images: bool = True
    """Whether requests may have images, if the model has a vision tower (V4.1)."""
    nccl_share: float = 1.0
    """Bytes of NCCL's buffers relative to its defaults, if their size or number was set."""

    def concurrent_batches(self, pipeline: int) -> int:
        """Return the number of concurrent batches (vLLM's `VllmConfig.max_concurrent_batches`)."""
        return pipeline + (1 if self.async_scheduling else 0)


class MemoryPool(StrEnum):
    """Memory pool of an item."""

    BUDGET = "budget"
    """Within the engine's budget (`gpu_memory_utilization`)."""
    BESIDE = "beside"
    """In the same memory outside of the budget."""


_EXPECTED = -(2**63)
"""Bound of an item without a range: its expected size."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a rank's memory."""

    name: str
    bytes: int
    """Expected size."""
    where: MemoryPool
    note: str = ""
    least: int = _EXPECTED
    most: int = _EXPECTED

    def __post_init__(self) -> None:
        for name in ("least", "most"):
            if getattr(self, name) == _EXPECTED:
                object.__setattr__(self, name, self.bytes)


def ranged(name: str, size: Range, where: MemoryPool, note: str = "", *, plus: int = 0) -> Item:
    """Return an item of `size` in GiB and `plus` bytes."""
    least, expected, most = (int(each * GIB) + plus for each in (size.least, size.expected, size.most))
    return Item(name, expected, where, note, least, most)


@dataclass(frozen=True, slots=True)
class Measured:
    """Differences between the logged and the planned memory of a start with the same model, image and machine."""

    of: str
    """Model, image and machine of the start."""
    date: str
    """Date of the start: `2026-11-23`."""
    differences: Mapping[str, int] = field(hash=False)
    """Bytes by item name: logged minus planned, negative if the plan was too high."""

    def applied(self, item: Item) -> Item:
        """Return `item` with its measured size and a tenth of its range, because settings may have changed."""
        if item.name not in self.differences:
            return item
        # Other differences than those of the weights may be negative: of memory released during the profile.
        size = item.bytes + self.differences[item.name]
        below, above = (item.bytes - item.least) // 10, (item.most - item.bytes) // 10
        note = f"measured here on {self.date}"
        return Item(item.name, size, item.where, note, size - below, size + above)


class FitVerdict(StrEnum):
    """Whether a plan fits."""

    FITS = "fits"
    """As expected, with room for at least one request of the greatest length."""
    UNCERTAIN = "uncertain"
    """Only if the memory is better than expected, within its interval."""
    NO = "does not fit"
    """Not even with the best values of the interval."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The memory of one rank."""

    rank: int
    node: int
    stage: int
    weights: tuple[tuple[Part, int], ...]
    """Parts of the item `weights`."""
    items: tuple[Item, ...]
    """All memory except the KV cache; weights first."""
    memory_bytes: int
    """Memory of the rank: of its accelerator, or an equal share of unified memory."""
    budget_bytes: int
    """Limit of the engine's memory, including the KV cache."""
    kv_available: int
    """Memory for the KV cache on this rank; negative if the items alone exceed the budget."""
    kv_least: int
    """Lower end of the interval of `kv_available` that contains 90 % of comparable logged starts."""
    kv_most: int
    """Its upper end."""
    kv_bytes: int
    """Size of the KV cache: whole blocks, limited by the tightest rank."""
    kv_given: bool
    """Whether the size of the KV cache was given; otherwise it is the rest of the budget."""
    loader_bytes: int
    """Temporary memory of the load beside the weights, released before the KV cache is allocated."""

    def total(self, where: MemoryPool | None = None) -> int:
        """Return the bytes of the items in `where` (or of all), without the KV cache."""
        return sum(item.bytes for item in self.items if where is None or item.where is where)

    def above(self, where: MemoryPool | None = None) -> int:
        """Return the difference between the upper bounds and the expected sizes of the items in `where`, in bytes."""
        return sum(item.most - item.bytes for item in self.items if where is None or item.where is where)

    def below(self, where: MemoryPool | None = None) -> int:
        """Return the difference between the expected sizes and the lower bounds of the items in `where`, in bytes."""
        return sum(item.bytes - item.least for item in self.items if where is None or item.where is where)

    @property
    def used_bytes(self) -> int:
        """Return the planned bytes: items, reserve and KV cache."""
        return self.total() + self.kv_bytes

    @property
    def spare_bytes(self) -> int:
        """Return the unplanned bytes; negative if the plan exceeds the memory."""
        return self.memory_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class KvPlan:
    """KV cache, the same on every rank of a stage."""

    bytes_per_block: int
    """Bytes of a block on the widest stage."""
    blocks: int
    """`num_gpu_blocks` of vLLM."""
    blocks_per_request: int
    """Blocks of one request of the greatest length, including its tokens in flight."""
    in_flight_tokens: int
    tokens: int
    """`GPU KV cache size: … tokens` in the log of vLLM."""
    concurrency: float
    """`Maximum concurrency for … tokens per request: …x` in the log of vLLM."""
    concurrency_least: float
    concurrency_most: float
    request_bytes: int
    """`blocks_per_request` in bytes, on the widest stage."""
    request_least: int
    """Lower end of the interval of `request_bytes`: logged starts of builds with the same format."""
    request_most: int
    """Its upper end."""
    in_flight_bytes: int
    """Part of `request_bytes` for tokens in flight."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory plan of a group: inputs, ranks, KV cache and verdict."""

    model: Model = field(repr=False)
    machine: Machine = field(repr=False)
    parallel: Parallel
    engine: EngineSettings
    measured: Measured | None
    ranks: tuple[RankPlan, ...]
    kv: KvPlan | None
    """None if the layout of the model's cache is unknown."""
    fits: bool
    """With every item at its expected size."""
    verdict: FitVerdict
    uncertainty_bytes: int
    """Bytes by which the KV cache of the tightest rank may be smaller than expected."""
    lacks_at_most: int
    """Bytes that a rank lacks in the worst case of its interval; 0 or less if none."""
    tightest: int
    """Rank with the least memory left; it limits the KV cache of all."""
    problem: str
    """Reason why it does not fit, as one sentence; empty if it fits."""
    short_bytes: int
    """Bytes that the tightest rank lacks with every item at its expected size; 0 if it fits."""

    def budget_items(self) -> dict[str, int]:
        """Return the bytes of the KV cache and of every item in the engine's budget, on the tightest rank."""
        rank = self.ranks[self.tightest]
        items = {item.name: item.bytes for item in rank.items if item.where is MemoryPool.BUDGET}
        return items if rank.kv_given else items | {KV_CACHE: rank.kv_available}
