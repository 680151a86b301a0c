"""What goes into a memory plan, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from dsv4_operator.planning.catalog.records import Machine, Model, Part


@dataclass(frozen=True, slots=True)
class Parallel:
    """How a group is divided over devices and machines."""

    tensor: int = 1
    pipeline: int = 1
    devices_per_node: int = 1
    expert: bool = False
    """Expert parallelism: whole experts on each rank instead of a share of every expert. Same bytes."""

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class Engine:
    """What of the engine's settings takes memory."""

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
    nccl_buffer_bytes: int | None = None
    """NCCL's buffers on each rank, where they were set by hand."""

    def concurrent_batches(self, pipeline: int) -> int:
        """Batches that may be under way at once (vLLM's `VllmConfig.max_concurrent_batches`)."""
        return pipeline + (1 if self.async_scheduling else 0)


class Where(StrEnum):
    """Which memory an item takes."""

    BUDGET = "budget"
    """Within what the engine was given (`gpu_memory_utilization`)."""
    BESIDE = "beside"
    """Of the same memory, but not within what the engine counts."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a rank's memory."""

    name: str
    bytes: int
    where: Where
    note: str = ""


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
    kv_bytes: int
    """That the KV cache takes: whole blocks, as many as the tightest rank can hold."""
    loader_bytes: int
    """That loading takes for a while beside the weights, before there is a KV cache."""

    def total(self, where: Where | None = None) -> int:
        """Bytes of the items in `where` (or of all), the KV cache not included."""
        return sum(item.bytes for item in self.items if where is None or item.where is where)

    @property
    def used_bytes(self) -> int:
        """Everything that is planned: items, reserve and KV cache."""
        return self.total() + self.kv_bytes

    @property
    def spare_bytes(self) -> int:
        """Negative when more is planned than there is."""
        return self.memory_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The KV cache, the same on every rank of a stage."""

    bytes_per_block: int
    """Of the widest stage."""
    blocks: int
    """What vLLM calls `num_gpu_blocks`."""
    blocks_per_request: int
    """Of one request of the greatest length, with the reserve for its tokens in flight."""
    in_flight_tokens: int
    tokens: int
    """As vLLM prints it: `GPU KV cache size: … tokens`."""
    concurrency: float
    """As vLLM prints it: `Maximum concurrency for … tokens per request: …x`."""
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
    engine: Engine
    ranks: tuple[RankPlan, ...]
    kv: KvPlan | None
    """None where the layout of the model's cache is not known."""
    fits: bool
    tightest: int
    """The rank that limits all."""
    problem: str
    """Why it does not fit, in one sentence; empty if it does."""
    short_bytes: int
    """What the tightest rank lacks; 0 if it fits."""
