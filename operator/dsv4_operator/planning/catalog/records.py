"""Records of the catalog (machines and models, a source for every figure), ports, units, limits of the Nano model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

DASHBOARD_PORT = 8265
API_PORT = 8000
"""Ports at a member's own address; those under which a group is published are `spec.network.ports`."""

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class NanoProfile:
    """The Nano model on CPU, two members on two cores.

    Members were measured at 2.9 GiB (rank 0) and 1.6 GiB (rank 1), KV cache included (docs/measurements.md); the bytes
    are upper estimates over that. Seconds are bounds, `ready_seconds` what a start takes on a busy machine.
    """

    max_model_len: int = 1024
    kv_cache_bytes: int = 512 * MIB
    """For each rank; 13 800 tokens, so that one request of the greatest length fits."""
    object_store_bytes: int = 80_000_000
    """Ray's least is 75 MiB; vLLM puts nothing there."""
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
    """False: nobody has confirmed it; shown as such, and no refusal may rest on it alone."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of machine: one accelerator of it, and the host as far as it matters to a rank."""

    id: str
    """`gb10`, `gb10-64gb`, `rtx-pro-6000-workstation`, …"""
    title: str
    hardware: str
    """The `spec.topology.hardware` that it belongs to; empty when no deployment can ask for it."""
    unified_memory: bool
    """Whether the accelerator's memory is the host's own."""
    memory_bytes: int
    """Memory of one accelerator as the system sees it; 0 for a CPU, whose memory only the machine itself tells."""
    utilization: float
    """Share of the memory that an engine takes by default (`--gpu-memory-utilization`)."""
    utilization_max: float
    """The greatest share that is known to have worked."""
    bandwidth: float = 0.0
    """Bytes a second of the memory, nominal."""
    sm: int = 0
    """Compute capability: 120 or 121; 0 without an accelerator."""
    multiprocessors: int = 0
    shared_memory_bytes: int = 0
    """That one block may ask for."""
    power_watts: int = 0
    nics: tuple[str, ...] = ()
    """RDMA devices of the fabric, as the system names them; empty when the host has none of its own kind."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of `nics`, in the same order."""
    sources: Mapping[str, Source] = field(default_factory=dict, repr=False, compare=False)
    """By field name."""

    def source(self, name: str) -> Source | None:
        """Return where the value of field `name` comes from; None for identity and words of our own."""
        return self.sources.get(name)


@dataclass(frozen=True, slots=True)
class Range:
    """A figure that the sources bound: what is expected, and the least and the most that was seen or follows."""

    least: float
    expected: float
    most: float

    def __post_init__(self) -> None:
        if not self.least <= self.expected <= self.most:
            raise ValueError(f"{self.expected} is not between {self.least} and {self.most}")


EXACT = Range(1.0, 1.0, 1.0)
"""A share that does not vary."""


@dataclass(frozen=True, slots=True)
class Build:
    """Traits of an engine build that decide memory; of an image profile. The defaults are those of released vLLM."""

    tensors: Range = Range(0.985, 1.0, 1.02)
    """Bytes that a load takes over those of the tensors on a rank: seven logs of four builds."""
    experts: Range = Range(1.0, 1.0, 1.0)
    """Bytes of the routed experts as they are kept, over their bytes in the checkpoint: formats that are converted,
    and experts that are loaded twice."""
    expert_rows: int = 128
    """Rows that the MoE kernels round an expert's share up to."""
    workspace: Range = Range(0.0, 0.0, 0.0)
    """Of sparse attention: 1 where a prefill gathers the compressed context, 0 where its kernels read the cache."""
    indexer_factor: int | None = None
    """vLLM's `sparse_mla_prefill_workspace_factor`. Default: its own choice."""
    graphs_counted: bool = True
    """Whether the estimate of the graphs comes off `gpu_memory_utilization` (vLLM since 0.21)."""
    graph: Range | None = None
    """GiB that the estimate has for each captured size. Default: the machine's."""
    other: Range | None = None
    """GiB that vLLM calls non-torch, with buffers that outlive the profile. Default: the machine's."""
    head: Range | None = None
    """GiB that rank 0 has beyond that on unified memory. Default: the executor's."""


RELEASED = Build()
"""The builds that vLLM releases."""


def build_of(row: Mapping[str, Any]) -> Build:
    """Return the build that a table of a data file describes; ranges are lists of three numbers."""
    values: dict[str, Any] = {name: Range(*value) if isinstance(value, list) else value for name, value in row.items()}
    return Build(**values)


class Division(StrEnum):
    """Division of a component of the weights among the ranks."""

    TENSOR = "tensor"
    """Over the tensor-parallel ranks."""
    EXPERT = "expert"
    """Routed experts: over the tensor-parallel ranks, by rows, or by whole experts with expert parallelism."""
    REPLICATED = "replicated"
    """The whole on every rank of the stage."""


class Part(StrEnum):
    """Kind of a component of the weights, for tables."""

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
    """Tensors that the shape does not describe: the draft heads' own, V4.1's vision tower."""


@dataclass(frozen=True, slots=True)
class WeightComponent:
    """Weights of one kind in one place of the model."""

    part: Part
    division: Division
    bytes: int
    format: str
    """`fp8-128x128`, `mxfp4`, `bf16`, `fp32`, … as stored."""


@dataclass(frozen=True, slots=True)
class Speculative:
    """The heads that the checkpoint brings for speculative decoding."""

    method: str
    """`mtp` or `dspark`."""
    layers: int
    """Draft layers (MTP) or stages (DSpark)."""
    tokens: int
    """Draft tokens that the heads were trained for: the value to start with."""
    components: tuple[WeightComponent, ...] = field(default=(), repr=False)
    """Of all draft layers together; they live on the last stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """Dimensions of a model's shape that decide the bytes of its weights."""

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
    """One for each decoder layer: 0 (sliding window only), 4 or 128; in V4.1 1 or 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Dimensions):
    """One checkpoint: its shape, the bytes of its weights, and what the engine must be told about it."""

    name: str
    variant: str
    """The `spec.model.variant` that it belongs to."""
    repo: str
    """On the Hugging Face hub; empty for a checkpoint that was read from disk."""
    architecture: str
    index_topk: int
    window: int
    max_positions: int
    kv_format: str
    """The format of the KV cache that the engine chooses for it, on CPU too."""
    # The components have no part in the hash: there are hundreds, and plans of one model are made by the hundred.
    embedding: tuple[WeightComponent, ...] = field(repr=False, hash=False)
    """First stage."""
    layers: tuple[tuple[WeightComponent, ...], ...] = field(repr=False, hash=False)
    """One entry for each decoder layer."""
    head: tuple[WeightComponent, ...] = field(repr=False, hash=False)
    """Last stage: final norm, output layer."""
    speculative: Speculative | None = field(hash=False)
    checkpoint_bytes: int
    """Size of the safetensors files (or of their tensors, where only that is published)."""
    shards: int = 0
    tokenizer_mode: str = "deepseek_v4"
    reasoning_parser: str = "deepseek_v4"
    tool_call_parser: str = "deepseek_v4"
    host_components: tuple[WeightComponent, ...] = field(default=(), repr=False, hash=False)
    """Tables that the engine keeps in the host's memory (which is the accelerator's on unified memory)."""
    kv_known: bool = True
    """False: the layout of its KV cache is not known well enough to plan blocks, only weights."""
    kv_sources: tuple[int, ...] = ()
    """Layers that have a compressed cache, which those after them read; empty: every layer with a ratio has its own."""
    block_tokens: int = 256
    """The only block size that its compressed caches page into."""
    sources: Mapping[str, Source] = field(default_factory=dict, repr=False, compare=False)
    """By field name; `*` is for all others."""

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all tensors, draft layers included."""
        drafts = self.speculative.components if self.speculative else ()
        every = (self.embedding, *self.layers, self.head, drafts, self.host_components)
        return sum(part.bytes for group in every for part in group)

    def source(self, name: str) -> Source | None:
        """Return where the value of field `name` comes from."""
        return self.sources.get(name) or self.sources.get("*")
