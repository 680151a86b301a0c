"""Records of the catalog (machines and models, a source for every figure), ports, units, limits of the Nano model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

DASHBOARD_PORT = 8265
API_PORT = 8000
"""Ports at a member's own address; `spec.network.ports` are the published ones."""

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class NanoProfile:
    """Limits of the Nano model on CPU, two members on two cores.

    Measured members: 2.9 GiB (rank 0) and 1.6 GiB (rank 1), KV cache included (docs/measurements.md); the bytes are
    upper estimates. Seconds are time limits; `ready_seconds` is the duration of a start on a busy machine.
    """

    max_model_len: int = 1024
    kv_cache_bytes: int = 512 * MIB
    """For each rank: 13 800 tokens, enough for one request of the greatest length."""
    object_store_bytes: int = 80_000_000
    """Ray's minimum is 75 MiB; vLLM does not use it."""
    queue_bytes: int = 192 * MIB
    """vLLM's message queues in shared memory."""
    head_bytes: int = 2 * GIB
    """Ray's head processes, the API server and the engine core."""
    rank_bytes: int = 1 * GIB
    """Ray's node processes and one worker with its weights, without the KV cache."""
    staging_seconds: float = 120.0
    load_seconds: float = 300.0
    ready_seconds: float = 45.0


NANO = NanoProfile()


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a figure."""

    text: str
    """A document, repository or log that shows it."""
    date: str
    """Day of the source, or on which it was read: `2026-08-19`."""
    verified: bool = True
    """False: unconfirmed; displayed as such, and no refusal may depend on it alone."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of machine: one of its accelerators, and the properties of the host that affect a rank."""

    id: str
    """`gb10`, `gb10-64gb`, `rtx-pro-6000-workstation`, …"""
    title: str
    hardware: str
    """Its `spec.topology.hardware`; empty if no deployment can request it."""
    unified_memory: bool
    """Whether the accelerator's memory is the host's own."""
    memory_bytes: int
    """Memory of one accelerator as the system reports it; 0 for a CPU, whose memory is known on the machine only."""
    utilization: float
    """Default share of the memory for an engine (`--gpu-memory-utilization`)."""
    utilization_max: float
    """Greatest share that is known to work."""
    bandwidth: float = 0.0
    """Bytes a second of the memory, nominal."""
    sm: int = 0
    """Compute capability: 120 or 121; 0 without an accelerator."""
    multiprocessors: int = 0
    shared_memory_bytes: int = 0
    """Maximum for one block."""
    power_watts: int = 0
    nics: tuple[str, ...] = ()
    """System names of the RDMA devices of the fabric; empty if the host has no built-in ones."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of `nics`, in the same order."""
    sources: Mapping[str, Source] = field(default_factory=dict, repr=False, compare=False)
    """By field name."""

    @property
    def is_sm12x(self) -> bool:
        """Return whether the compute capability is 12.x."""
        return self.sm // 10 == 12

    def source(self, name: str) -> Source | None:
        """Return the source of the field `name`; None for identity and descriptions."""
        return self.sources.get(name)


@dataclass(frozen=True, slots=True)
class Range:
    """A figure with the expected value and its bounds, observed or derived."""

    least: float
    expected: float
    most: float

    def __post_init__(self) -> None:
        if not self.least <= self.expected <= self.most:
            raise ValueError(f"{self.expected} is not between {self.least} and {self.most}")


@dataclass(frozen=True, slots=True)
class Build:
    """Properties of an engine build that determine its memory. The defaults are those of released vLLM."""

    tensors: Range = Range(0.985, 1.0, 1.02)
    """Memory of the loaded weights over the bytes of the tensors on a rank: seven logs of four builds."""
    experts: Range = Range(1.0, 1.0, 1.0)
    """Bytes of the routed experts in memory over those in the checkpoint: converted formats, experts loaded twice."""
    experts_shared: Range | None = None
    """The same for models whose layers share their caches (V4.1). Default: `experts`."""
    expert_rows: int = 128
    """Multiple of rows to which the MoE kernels round an expert's share up."""
    workspace: Range = Range(0.0, 0.0, 0.0)
    """Workspace of sparse attention: 1 if a prefill gathers the compressed context, 0 if kernels read the cache."""
    indexer_factor: int | None = None
    """`sparse_mla_prefill_workspace_factor` of vLLM. Default: vLLM's own value."""
    graphs_counted: bool = True
    """Whether the estimate of the graphs is part of `gpu_memory_utilization` (vLLM since 0.21)."""
    graph: Range | None = None
    """GiB of the estimate for each captured size. Default: that of the machine."""
    scratch: bool = False
    """Whether the MoE kernels keep scratch memory for every routed row of a step (b12x), within the profile."""
    window_groups: int = 3
    """Groups of window layers with several draft layers."""
    drafts_in_flight: bool = False
    """Whether the draft tokens and the sampled token of a step count as tokens in flight."""
    state_pages: int = 0
    """States of a compressed page of V4.1, and tokens of a window page: 64 in builds for FlashInfer's kernels on SM12x.
    0: those of released vLLM."""
    nccl_counted: Range = Range(0.0, 0.0, 0.0)
    """GiB for each peer of NCCL's buffers that are allocated after vLLM's first measurement, on unified memory with
    more than two ranks and NCCL's defaults."""
    other: Range | None = None
    """GiB of vLLM's non-torch memory and of buffers that outlive the profile. Default: that of the machine."""
    head: Range | None = None
    """Additional GiB of rank 0 on unified memory. Default: that of the executor."""
    padded_tensor: tuple[int, ...] = ()
    """Tensor-parallel sizes for which the build pads heads and groups that they do not divide."""
    residual: tuple[float, float] | None = None
    """GiB of KV cache of logged starts below and above their plans: the interval that contains 90 % of them. Default:
    that of the kind of memory."""


RELEASED = Build()
"""Released vLLM builds."""


def build_of(row: Mapping[str, Any]) -> Build:
    """Return the build of a table in a data file; ranges are lists of three numbers."""
    values: dict[str, Any] = {
        name: tuple(value)
        if name in ("residual", "padded_tensor")
        else Range(*value)
        if isinstance(value, list)
        else value
        for name, value in row.items()
    }
    return Build(**values)


class Division(StrEnum):
    """Division of a component of the weights among the ranks."""

    TENSOR = "tensor"
    """Divided over the tensor-parallel ranks."""
    EXPERT = "expert"
    """Routed experts: divided over the tensor-parallel ranks by rows, with expert parallelism by whole experts."""
    REPLICATED = "replicated"
    """Complete on every rank of the stage."""


class Part(StrEnum):
    """Kind of a component of the weights, displayed in tables."""

    EXPERTS = "routed experts"
    ATTENTION = "attention"
    SHARED_EXPERT = "shared expert"
    COMPRESSOR = "compressor"
    INDEXER = "indexer"
    ROUTER = "router and norms"
    HYPER_CONNECTION = "hyper-connections"
    EMBEDDING = "embedding and head"
    ENGRAM = "engram tables"
    DRAFTS = "draft layers"
    OTHER = "other"
    """Tensors outside the shape: those of the draft heads, the vision tower of V4.1."""


@dataclass(frozen=True, slots=True)
class WeightComponent:
    """Weights of one kind in one place of the model."""

    part: Part
    division: Division
    bytes: int
    format: str
    """Stored format: `fp8-128x128`, `mxfp4`, `bf16`, `fp32`, …"""


@dataclass(frozen=True, slots=True)
class Speculative:
    """Heads of the checkpoint for speculative decoding."""

    method: str
    """`mtp` or `dspark`."""
    layers: int
    """Draft layers (MTP) or stages (DSpark)."""
    tokens: int
    """Draft tokens that the heads were trained for: the default."""
    components: tuple[WeightComponent, ...] = field(default=(), repr=False)
    """Components of all draft layers; they are on the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Dimensions of a model that determine the bytes of its weights."""

    hidden: int
    moe_inter: int
    heads: int
    head_dim: int
    q_lora: int
    o_groups: int
    o_lora: int
    experts: int
    experts_per_token: int
    shared_experts: int
    hash_layers: int
    index_heads: int
    index_dim: int
    hc_mult: int
    vocab: int
    compress_ratios: tuple[int, ...]
    """Ratio of each decoder layer: 0 (sliding window only), 4 or 128; in V4.1 1 or 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Dimensions):
    """One checkpoint: its shape, the bytes of its weights, and the engine settings that it requires."""

    name: str
    variant: str
    """Its `spec.model.variant`."""
    repo: str
    """Repository on the Hugging Face Hub; empty for a checkpoint read from disk."""
    architecture: str
    index_topk: int
    window: int
    max_positions: int
    kv_format: str
    """Default format of its KV cache in the engine, on CPU too."""
    # The hash excludes the components: there are hundreds, and one model has hundreds of plans.
    embedding: tuple[WeightComponent, ...] = field(repr=False, hash=False)
    """Components of the first stage before its first layer."""
    layers: tuple[tuple[WeightComponent, ...], ...] = field(repr=False, hash=False)
    """Components of each decoder layer."""
    head: tuple[WeightComponent, ...] = field(repr=False, hash=False)
    """Components of the last stage: final norm, output layer."""
    speculative: Speculative | None = field(hash=False)
    checkpoint_bytes: int
    """Size of the safetensors files, or of their tensors if only that is published."""
    shards: int = 0
    tokenizer_mode: str = "deepseek_v4"
    reasoning_parser: str = "deepseek_v4"
    tool_call_parser: str = "deepseek_v4"
    host_components: tuple[WeightComponent, ...] = field(default=(), repr=False, hash=False)
    """Tables in the memory of the host (on unified memory also that of the accelerator)."""
    kv_known: bool = True
    """False: the layout of its KV cache is unknown, so only its weights are planned."""
    kv_sources: tuple[int, ...] = ()
    """Layers whose compressed cache later layers read too; empty: every layer with a ratio has its own."""
    block_tokens: int = 256
    """The only possible block size of its compressed caches."""
    sources: Mapping[str, Source] = field(default_factory=dict, repr=False, compare=False)
    """By field name; `*` is for all others."""

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all tensors, draft layers included."""
        drafts = self.speculative.components if self.speculative else ()
        every = (self.embedding, *self.layers, self.head, drafts, self.host_components)
        return sum(part.bytes for group in every for part in group)

    def source(self, name: str) -> Source | None:
        """Return the source of the field `name`."""
        return self.sources.get(name) or self.sources.get("*")
