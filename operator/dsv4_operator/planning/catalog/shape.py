"""The bytes of a DeepSeek-V4 checkpoint from its shape: every tensor of the released files, by name and format.

Tensor names and formats: vLLM's mapping (`models/deepseek_v4/nvidia/model.py`) and the files' own headers. Nothing is
read here; `checkpoint` counts the same components from the headers of files that are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsv4_operator.planning.catalog.records import Dimensions, Division, Part, WeightComponent

_BLOCK = {"fp8-128x128": 128, "fp8-32x32": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(Dimensions):
    """Dimensions and formats that decide the bytes."""

    linear_format: str
    """`fp8-128x128`, `fp8-32x32` or `bf16`."""
    expert_format: str
    """`mxfp4`, `nvfp4` or `bf16`."""


def linear_bytes(rows: int, columns: int, form: str) -> int:
    """Return the bytes of one matrix: FP8 carries one scale byte for each block."""
    if form == "bf16":
        return 2 * rows * columns
    block = _BLOCK[form]
    return rows * columns + -(-rows // block) * -(-columns // block)


def expert_bytes(rows: int, columns: int, form: str) -> int:
    """Return the bytes of one matrix of an expert: MXFP4 has a scale byte for 32 values, NVFP4 one for 16 and 8 bytes
    beside.
    """
    match form:
        case "bf16":
            return 2 * rows * columns
        case "mxfp4":
            return rows * columns // 2 + rows * columns // 32
        case "nvfp4":
            return rows * columns // 2 + rows * columns // 16 + 8
    raise ValueError(f"the expert format {form!r} is unknown; known are mxfp4, nvfp4, bf16")


def embedding(shape: Shape) -> tuple[WeightComponent, ...]:
    """Return what the first stage has before its first layer."""
    return (WeightComponent(Part.EMBEDDING, Division.TENSOR, 2 * shape.vocab * shape.hidden, "bf16"),)


def head(shape: Shape) -> tuple[WeightComponent, ...]:
    """Return what the last stage has after its last layer."""
    width = shape.hc_mult * shape.hidden
    return (
        WeightComponent(Part.EMBEDDING, Division.TENSOR, 2 * shape.vocab * shape.hidden, "bf16"),
        WeightComponent(Part.ROUTER, Division.REPLICATED, 2 * shape.hidden, "bf16"),
        WeightComponent(Part.HYPER_CONNECTION, Division.REPLICATED, 4 * (shape.hc_mult * (width + 1) + 1), "fp32"),
    )


def layers(shape: Shape) -> tuple[tuple[WeightComponent, ...], ...]:
    """Return every decoder layer."""
    made: dict[tuple[int, bool], tuple[WeightComponent, ...]] = {}
    found = []
    for number, ratio in enumerate(shape.compress_ratios):
        kind = (ratio, number < shape.hash_layers)
        if kind not in made:
            made[kind] = tuple(_layer(shape, *kind))
        found.append(made[kind])
    return tuple(found)


def draft_layer(shape: Shape, *, experts: int | None = None) -> tuple[WeightComponent, ...]:
    """Return one layer of multi-token prediction: a window-only layer, and two projections that join it to the model.

    Args:
        shape: the model's.
        experts: of a draft layer, where it has fewer than the model's layers.
    """
    if experts is not None:
        shape = replace(shape, experts=experts)
    join = WeightComponent(
        Part.ATTENTION,
        Division.REPLICATED,
        2 * linear_bytes(shape.hidden, shape.hidden, shape.linear_format),
        shape.linear_format,
    )
    return (*_layer(shape, 0, False), join)


def _layer(shape: Shape, ratio: int, hashed: bool) -> Iterator[WeightComponent]:
    yield from _attention(shape)
    if ratio:
        yield _compressor(shape, ratio, shape.head_dim, Part.COMPRESSOR)
    if ratio == 4:
        yield _compressor(shape, ratio, shape.index_dim, Part.INDEXER)
        queries = linear_bytes(shape.index_heads * shape.index_dim, shape.q_lora, shape.linear_format)
        yield WeightComponent(Part.INDEXER, Division.REPLICATED, queries, shape.linear_format)
        yield WeightComponent(Part.INDEXER, Division.REPLICATED, 2 * shape.index_heads * shape.hidden, "bf16")
    yield from _experts(shape, hashed)
    mix = (2 + shape.hc_mult) * shape.hc_mult
    streams = mix * shape.hc_mult * shape.hidden + mix + 3
    yield WeightComponent(Part.HYPER_CONNECTION, Division.REPLICATED, 2 * 4 * streams, "fp32")
    yield WeightComponent(Part.ROUTER, Division.REPLICATED, 2 * 2 * shape.hidden, "bf16")


def _attention(shape: Shape) -> Iterator[WeightComponent]:
    form, heads = shape.linear_format, shape.heads * shape.head_dim
    divided = (
        linear_bytes(heads, shape.q_lora, form)
        + linear_bytes(shape.o_groups * shape.o_lora, heads // shape.o_groups, form)
        + linear_bytes(shape.hidden, shape.o_groups * shape.o_lora, form)
    )
    whole = linear_bytes(shape.q_lora, shape.hidden, form) + linear_bytes(shape.head_dim, shape.hidden, form)
    yield WeightComponent(Part.ATTENTION, Division.TENSOR, divided, form)
    yield WeightComponent(Part.ATTENTION, Division.REPLICATED, whole, form)
    yield WeightComponent(Part.ATTENTION, Division.TENSOR, 4 * shape.heads, "fp32")
    yield WeightComponent(Part.ROUTER, Division.REPLICATED, 2 * (shape.q_lora + shape.head_dim), "bf16")


def _compressor(shape: Shape, ratio: int, dim: int, part: Part) -> WeightComponent:
    width = dim * (2 if ratio == 4 else 1)  # ratio 4 overlaps its windows: two series for each token
    return WeightComponent(
        part, Division.REPLICATED, 2 * 2 * width * shape.hidden + 4 * ratio * width + 2 * dim, "bf16"
    )


def _experts(shape: Shape, hashed: bool) -> Iterator[WeightComponent]:
    one = 2 * expert_bytes(shape.moe_inter, shape.hidden, shape.expert_format) + expert_bytes(
        shape.hidden, shape.moe_inter, shape.expert_format
    )
    yield WeightComponent(Part.EXPERTS, Division.EXPERT, shape.experts * one, shape.expert_format)
    shared = 2 * linear_bytes(shape.moe_inter, shape.hidden, shape.linear_format) + linear_bytes(
        shape.hidden, shape.moe_inter, shape.linear_format
    )
    yield WeightComponent(Part.SHARED_EXPERT, Division.TENSOR, shape.shared_experts * shared, shape.linear_format)
    yield WeightComponent(Part.ROUTER, Division.REPLICATED, 2 * shape.experts * shape.hidden, "bf16")
    if hashed:
        table = 8 * shape.vocab * shape.experts_per_token
        yield WeightComponent(Part.ROUTER, Division.REPLICATED, table, "int64")
    else:
        yield WeightComponent(Part.ROUTER, Division.REPLICATED, 4 * shape.experts, "fp32")
