"""Machines and models of `machines.toml` and `models.toml`, and their lookup by name.

The bytes of a model follow from its shape: every tensor of the released files, by name and format, as in vLLM's mapping
(`models/deepseek_v4/nvidia/model.py`) and the headers of the files. `checkpoint` counts the same components from the
headers of files on disk.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from dsv4_operator.api import (
    Finding,
    Hardware,
    ModelSource,
    ModelSpec,
    NanoSource,
    Precision,
    SpeculativeMethod,
    Variant,
)
from dsv4_operator.api.values import quoted
from dsv4_operator.planning.catalog.records import (
    Dimensions,
    Division,
    Machine,
    Model,
    Part,
    Source,
    Speculative,
    WeightComponent,
)

_PRODUCTS = (
    ("GB10", "gb10"),
    ("RTX-PRO-6000-BLACKWELL-MAX-Q", "rtx-pro-6000-max-q"),
    ("RTX-PRO-6000-BLACKWELL-SERVER", "rtx-pro-6000-server"),
    ("RTX-PRO-6000-BLACKWELL", "rtx-pro-6000-workstation"),
    ("RTX-5090", "rtx-5090"),
    ("H100", "h100"),
    ("H200", "h200"),
)
"""Parts of product names and the id of the machine; the first match applies."""
_BY_VARIANT = {Variant.NANO: "Nano", Variant.FLASH: "V4-Flash", Variant.PRO: "V4-Pro"}
_BLOCK = {"fp8-128x128": 128, "fp8-32x32": 32}
_HASH = re.compile(r"[0-9a-f]{7,64}")
_GENERIC_DIRECTORIES = frozenset(
    {"snapshots", "main", "model", "models", "weights", "checkpoint", "checkpoints", "hub"}
)
"""Directories whose name does not identify a checkpoint."""
_CACHED = "models--"
"""Prefix of a repository's directory in the cache of the Hub, with `--` for its `/`."""


class UnknownCheckpoint(ValueError):
    """The name of a source is not in the catalog, or contradicts the specification."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


def machine(hardware: Hardware) -> Machine:
    """Return the default machine of a kind: a DGX Spark with 128 GB, RTX PRO 6000 Workstation edition, or this CPU."""
    return next(each for each in machines() if each.hardware == hardware)


def machine_named(name: str) -> Machine:
    """Return the machine with the id `name`.

    Raises:
        KeyError: there is none; the text lists all.
    """
    for each in machines():
        if each.id == name:
            return each
    raise KeyError(f"the catalog has no machine {name!r}; it has {', '.join(each.id for each in machines())}")


def product_machine(product: str) -> str | None:
    """Return the id of the machine with the accelerator `product`; None if the catalog has none.

    Args:
        product: name in NVML (`NVIDIA H100 80GB HBM3`) or in the label `nvidia.com/gpu.product`.
    """
    label = product.upper().replace(" ", "-")
    return next((machine for text, machine in _PRODUCTS if text in label), None)


@cache
def machines() -> tuple[Machine, ...]:
    """Return all machines of the catalog, the default of each kind before its variants."""
    return tuple(
        Machine(**{**row, **{name: tuple(row.get(name, ())) for name in ("nics", "interfaces")}})
        for row in _rows("machine", "id")
    )


def model(name: str) -> Model:
    """Return a checkpoint by name (`V4-Flash-0731`), repository (`deepseek-ai/DeepSeek-V4-Flash`) or variant (`Flash`).

    Raises:
        KeyError: there is none; the text lists all.
    """
    wanted = _BY_VARIANT.get(Variant(name), name) if name in list(Variant) else name
    for each in models():
        if wanted in (each.name, each.repo):
            return each
    raise KeyError(f"the catalog has no model {name!r}; it has {', '.join(each.name for each in models())}")


@cache
def models() -> tuple[Model, ...]:
    """Return all models of the catalog."""
    return tuple(map(_model, _rows("model", "name")))


def model_for(spec: ModelSpec) -> Model:
    """Return the checkpoint of a deployment: by `checkpoint`, else by the name in its source.

    Raises:
        UnknownCheckpoint: the name is not in the catalog, or belongs to another variant.
    """
    if spec.source.nano is not None:
        return model(_nano_name(spec.source.nano))
    if spec.variant is Variant.NANO:
        return model("Nano")
    field, name = ("spec.model.checkpoint", spec.checkpoint) if spec.checkpoint else _source_name(spec.source)
    found = checkpoint_named(name)
    if found is None:
        known = ", ".join(each.name for each in models() if each.repo)
        sized = ", and spec.model.size for a pruned or requantized one"
        remedy = f"use one of {known}" if spec.checkpoint else f"set spec.model.checkpoint to one of {known}{sized}"
        raise UnknownCheckpoint(Finding(field, "UnknownCheckpoint", "is not a known checkpoint", remedy, name))
    if found.variant != spec.variant:
        message = f"does not match {field} {quoted(name)}, which is {found.name}"
        remedy = f"write {found.variant}"
        raise UnknownCheckpoint(Finding("spec.model.variant", "VariantMismatch", message, remedy, spec.variant))
    return found if spec.size is None else resized(found, spec.size)


@lru_cache(maxsize=64)
def resized(model: Model, size: int) -> Model:
    """Return `model` with safetensors files of `size` bytes: its routed experts have the difference, drafts' included.

    Raises:
        UnknownCheckpoint: the size leaves no bytes for the experts, or is more than twice that of the model.
    """
    drafts = model.speculative.components if model.speculative else ()
    every = (*(part for layer in model.layers for part in layer), *drafts)
    experts = sum(part.bytes for part in every if part.division is Division.EXPERT)
    factor = 1 + (size - model.checkpoint_bytes) / experts
    if factor <= 0 or size > 2 * model.checkpoint_bytes:
        least, most = -(-(model.checkpoint_bytes - experts) // 2**30), 2 * model.checkpoint_bytes // 2**30
        message, remedy = f"is out of range for {model.name}", f"write {least}Gi to {most}Gi"
        raise UnknownCheckpoint(Finding("spec.model.size", "CheckpointSize", message, remedy, f"{size / 2**30:.4g}Gi"))

    def scaled(parts: Iterable[WeightComponent]) -> tuple[WeightComponent, ...]:
        return tuple(
            replace(part, bytes=round(factor * part.bytes)) if part.division is Division.EXPERT else part
            for part in parts
        )

    return replace(
        model,
        name=f"{model.name} with {size / 2**30:.1f} GiB",
        layers=tuple(map(scaled, model.layers)),
        speculative=replace(model.speculative, components=scaled(drafts)) if model.speculative else None,
        checkpoint_bytes=size,
    )


def checkpoint_named(name: str) -> Model | None:
    """Return the checkpoint whose name or repository ends `name`, a path or URL, in any case; None if there is none."""
    last = next((_normalized(part) for part in _checkpoint_parts(name)), "")
    return next((each for each in models() if each.repo and last == _normalized(each.name)), None)


def _rows(table: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data file, each with the values of its `base`."""
    text = resources.files("dsv4_operator.planning.catalog").joinpath(f"{table}s.toml").read_text("utf-8")
    rows: dict[str, dict[str, Any]] = {}
    for row in tomllib.loads(text)[table]:
        base = rows.get(row.pop("base", ""), {})
        own = {name: Source(**value) for name, value in row.pop("sources", {}).items()}
        rows[row[key]] = {**base, **row, "sources": {**base.get("sources", {}), **own}}
    yield from rows.values()


def _nano_name(source: NanoSource) -> str:
    precision = "-fp8" if source.precision is Precision.FP8 else ""
    return f"Nano{precision}" + (f"-{source.drafts}" if source.drafts is not SpeculativeMethod.NONE else "")


def _source_name(source: ModelSource) -> tuple[str, str]:
    """Return the field of a source that names its checkpoint, and its value."""
    if source.hugging_face is not None:
        return "spec.model.source.huggingFace.repo", source.hugging_face.repo
    if source.s3 is not None:
        return "spec.model.source.s3.prefix", f"{source.s3.bucket}/{source.s3.prefix}"
    if source.http is not None:
        return "spec.model.source.http.url", source.http.url
    if source.shared_path is not None:
        return "spec.model.source.sharedPath", source.shared_path
    return "spec.model.source.path", source.path or ""


def _checkpoint_parts(name: str) -> Iterator[str]:
    """Yield the parts of a path that may name a checkpoint, the last first."""
    for part in reversed(name.lower().split("/")):
        if part and part not in _GENERIC_DIRECTORIES and not _HASH.fullmatch(part):
            yield part.rsplit("--", 1)[-1] if part.startswith(_CACHED) else part


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").removeprefix("deepseek-")


def _model(row: Mapping[str, Any]) -> Model:
    ratios = tuple(
        ratio
        for part in row["ratios"]
        for _ in range(part["count"])
        for ratio in part.get("pattern", [part.get("ratio")])
    )
    shape = Shape(compress_ratios=ratios, **{each.name: row[each.name] for each in fields(Shape) if each.name in row})
    embedding, layers, head = shape.embedding(), shape.layers(), shape.head()
    host = (
        (WeightComponent(Part.ENGRAM, Division.TENSOR, row["engram_bytes"], "fp8"),) if row.get("engram_bytes") else ()
    )
    known = sum(part.bytes for group in (embedding, *layers, head, host) for part in group)
    drafts = _drafts(row, shape, row["checkpoint_bytes"] - known)
    total = known + sum(part.bytes for part in drafts.components) if drafts else known
    # V4.1 has parts that the shape does not describe (a vision tower); the published size includes them.
    unlisted = row["checkpoint_bytes"] - total
    if unlisted > 0:
        head = (*head, WeightComponent(Part.OTHER, Division.REPLICATED, unlisted, "mixed"))
    names = {each.name for each in fields(Model)} - {"speculative", "kv_sources", "checkpoint_bytes"}
    return Model(
        **{name: row[name] for name in names & row.keys()},
        compress_ratios=ratios,
        embedding=embedding,
        layers=layers,
        head=head,
        host_components=host,
        kv_sources=tuple(row.get("kv_sources", ())),
        speculative=drafts,
        checkpoint_bytes=row["checkpoint_bytes"] or total,
    )


def _drafts(row: Mapping[str, Any], shape: Shape, left: int) -> Speculative | None:
    """Return the draft layers, with the rest of the published size for their own heads: at most one layer's bytes."""
    if "speculative" not in row:
        return None
    described = row["speculative"]
    layer = shape.draft_layer(row.get("draft_experts"))
    components = layer * described["layers"]
    rest = left - sum(part.bytes for part in components)
    if 0 < rest < sum(part.bytes for part in layer):
        components = (*components, WeightComponent(Part.OTHER, Division.REPLICATED, rest, "bf16"))
    return Speculative(described["method"], described["layers"], described["tokens"], components)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(Dimensions):
    """Dimensions and formats of a model, and the components of its weights that follow from them."""

    linear_format: str
    """`fp8-128x128`, `fp8-32x32` or `bf16`."""
    expert_format: str
    """`mxfp4`, `nvfp4` or `bf16`."""

    def embedding(self) -> tuple[WeightComponent, ...]:
        """Return the components of the first stage before its first layer."""
        return (WeightComponent(Part.EMBEDDING, Division.TENSOR, 2 * self.vocab * self.hidden, "bf16"),)

    def head(self) -> tuple[WeightComponent, ...]:
        """Return the components of the last stage after its last layer."""
        streams = self.hc_mult * (self.hc_mult * self.hidden + 1) + 1
        return (
            WeightComponent(Part.EMBEDDING, Division.TENSOR, 2 * self.vocab * self.hidden, "bf16"),
            WeightComponent(Part.ROUTER, Division.REPLICATED, 2 * self.hidden, "bf16"),
            WeightComponent(Part.HYPER_CONNECTION, Division.REPLICATED, 4 * streams, "fp32"),
        )

    def layers(self) -> tuple[tuple[WeightComponent, ...], ...]:
        """Return the components of every decoder layer."""
        kinds = [(ratio, number < self.hash_layers) for number, ratio in enumerate(self.compress_ratios)]
        made = {kind: tuple(self._layer(*kind)) for kind in set(kinds)}
        return tuple(made[kind] for kind in kinds)

    def draft_layer(self, experts: int | None) -> tuple[WeightComponent, ...]:
        """Return one layer of multi-token prediction: a window-only layer and the two projections before it.

        Args:
            experts: of a draft layer, if it has fewer than the layers of the model.
        """
        shape = replace(self, experts=experts) if experts is not None else self
        join = 2 * self._linear_bytes(self.hidden, self.hidden)
        return (
            *shape._layer(0, False),
            WeightComponent(Part.ATTENTION, Division.REPLICATED, join, self.linear_format),
        )

    def _layer(self, ratio: int, hashed: bool) -> Iterator[WeightComponent]:
        yield from self._attention()
        if ratio:
            yield self._compressor(ratio, self.head_dim, Part.COMPRESSOR)
        if ratio == 4:
            yield self._compressor(ratio, self.index_dim, Part.INDEXER)
            queries = self._linear_bytes(self.index_heads * self.index_dim, self.q_lora)
            yield WeightComponent(Part.INDEXER, Division.REPLICATED, queries, self.linear_format)
            yield WeightComponent(Part.INDEXER, Division.REPLICATED, 2 * self.index_heads * self.hidden, "bf16")
        yield from self._experts(hashed)
        mix = (2 + self.hc_mult) * self.hc_mult
        streams = mix * self.hc_mult * self.hidden + mix + 3
        yield WeightComponent(Part.HYPER_CONNECTION, Division.REPLICATED, 2 * 4 * streams, "fp32")
        yield WeightComponent(Part.ROUTER, Division.REPLICATED, 2 * 2 * self.hidden, "bf16")

    def _attention(self) -> Iterator[WeightComponent]:
        heads = self.heads * self.head_dim
        divided = (
            self._linear_bytes(heads, self.q_lora)
            + self._linear_bytes(self.o_groups * self.o_lora, heads // self.o_groups)
            + self._linear_bytes(self.hidden, self.o_groups * self.o_lora)
        )
        whole = self._linear_bytes(self.q_lora, self.hidden) + self._linear_bytes(self.head_dim, self.hidden)
        yield WeightComponent(Part.ATTENTION, Division.TENSOR, divided, self.linear_format)
        yield WeightComponent(Part.ATTENTION, Division.REPLICATED, whole, self.linear_format)
        yield WeightComponent(Part.ATTENTION, Division.TENSOR, 4 * self.heads, "fp32")
        yield WeightComponent(Part.ROUTER, Division.REPLICATED, 2 * (self.q_lora + self.head_dim), "bf16")

    def _compressor(self, ratio: int, dim: int, part: Part) -> WeightComponent:
        width = dim * (2 if ratio == 4 else 1)  # ratio 4 overlaps its windows: two series for each token
        size = 2 * 2 * width * self.hidden + 4 * ratio * width + 2 * dim
        return WeightComponent(part, Division.REPLICATED, size, "bf16")

    def _experts(self, hashed: bool) -> Iterator[WeightComponent]:
        up, down = (self.moe_inter, self.hidden), (self.hidden, self.moe_inter)
        one = 2 * self._expert_bytes(*up) + self._expert_bytes(*down)
        yield WeightComponent(Part.EXPERTS, Division.EXPERT, self.experts * one, self.expert_format)
        shared = self.shared_experts * (2 * self._linear_bytes(*up) + self._linear_bytes(*down))
        yield WeightComponent(Part.SHARED_EXPERT, Division.TENSOR, shared, self.linear_format)
        yield WeightComponent(Part.ROUTER, Division.REPLICATED, 2 * self.experts * self.hidden, "bf16")
        if hashed:
            table = 8 * self.vocab * self.experts_per_token
            yield WeightComponent(Part.ROUTER, Division.REPLICATED, table, "int64")
        else:
            yield WeightComponent(Part.ROUTER, Division.REPLICATED, 4 * self.experts, "fp32")

    def _linear_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of one matrix: FP8 has one scale byte for each block."""
        if self.linear_format == "bf16":
            return 2 * rows * columns
        block = _BLOCK[self.linear_format]
        return rows * columns + -(-rows // block) * -(-columns // block)

    def _expert_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of one matrix of an expert.

        MXFP4 has one scale byte for 32 values; NVFP4 one for 16 values, and 8 further bytes.
        """
        match self.expert_format:
            case "bf16":
                return 2 * rows * columns
            case "mxfp4":
                return rows * columns // 2 + rows * columns // 32
            case "nvfp4":
                return rows * columns // 2 + rows * columns // 16 + 8
        raise ValueError(f"the expert format {self.expert_format!r} is unknown; known are mxfp4, nvfp4, bf16")
