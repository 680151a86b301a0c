"""The models of `models.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import resources
from typing import Any

from dsv4_operator.api import Variant
from dsv4_operator.planning.catalog import shape as bytes_of
from dsv4_operator.planning.catalog.records import Division, Model, Part, Source, Speculative, WeightComponent
from dsv4_operator.planning.catalog.shape import Shape

_BY_VARIANT = {Variant.NANO: "Nano", Variant.FLASH: "V4-Flash", Variant.PRO: "V4-Pro"}


def model(name: str) -> Model:
    """Return a checkpoint by name (`V4-Flash-0731`), repository (`deepseek-ai/DeepSeek-V4-Flash`) or variant (`Flash`).

    Raises:
        KeyError: there is none; the text names all.
    """
    wanted = _BY_VARIANT.get(Variant(name), name) if name in list(Variant) else name
    for found in models():
        if wanted in (found.name, found.repo):
            return found
    raise KeyError(f"the catalog has no model {name!r}; it has {', '.join(found.name for found in models())}")


@cache
def models() -> tuple[Model, ...]:
    """Return all models of the catalog."""
    text = resources.files("dsv4_operator.planning.catalog").joinpath("models.toml").read_text("utf-8")
    rows: dict[str, dict[str, Any]] = {}
    for row in tomllib.loads(text)["model"]:
        base = rows.get(row.pop("base", ""), {})
        sources = {**base.get("sources", {}), **row.get("sources", {})}
        rows[row["name"]] = {**base, **row, "sources": sources}
    return tuple(_read(row) for row in rows.values())


def _read(row: Mapping[str, Any]) -> Model:
    ratios = tuple(
        ratio
        for part in row["ratios"]
        for _ in range(part["count"])
        for ratio in part.get("pattern", [part.get("ratio")])
    )
    shape = shape_of(row, ratios)
    embedding, layers, head = bytes_of.embedding(shape), bytes_of.layers(shape), bytes_of.head(shape)
    host = (
        (WeightComponent(Part.ENGRAM, Division.TENSOR, row["engram_bytes"], "fp8"),) if row.get("engram_bytes") else ()
    )
    known = sum(part.bytes for group in (embedding, *layers, head, host) for part in group)
    drafts = _drafts(row, shape, row["checkpoint_bytes"] - known)
    total = known + sum(part.bytes for part in drafts.components) if drafts else known
    # V4.1 has parts that the shape does not describe (a vision tower); they are somewhere in the published size.
    unlisted = row["checkpoint_bytes"] - total
    if unlisted > 0:
        head = (*head, WeightComponent(Part.OTHER, Division.REPLICATED, unlisted, "mixed"))
    names = {field.name for field in fields(Model)} - {"sources", "speculative", "kv_sources"}
    return Model(
        **{name: row[name] for name in names & row.keys() if name != "checkpoint_bytes"},
        compress_ratios=ratios,
        embedding=embedding,
        layers=layers,
        head=head,
        host_components=host,
        kv_sources=tuple(row.get("kv_sources", ())),
        speculative=drafts,
        checkpoint_bytes=row["checkpoint_bytes"] or total,
        sources={name: Source(**value) for name, value in row["sources"].items()},
    )


def shape_of(row: Mapping[str, Any], ratios: tuple[int, ...]) -> Shape:
    """Return the dimensions of a model's row (or of a checkpoint's configuration under the same names)."""
    return Shape(
        compress_ratios=ratios, **{field.name: row[field.name] for field in fields(Shape) if field.name in row}
    )


def _drafts(row: Mapping[str, Any], shape: Shape, left: int) -> Speculative | None:
    """Return the draft layers, with what the published size leaves over for their own heads.

    That is at most one layer's worth.
    """
    if "speculative" not in row:
        return None
    told = row["speculative"]
    layer = bytes_of.draft_layer(shape, experts=row.get("draft_experts"))
    components = layer * told["layers"]
    rest = left - sum(part.bytes for part in components)
    if 0 < rest < sum(part.bytes for part in layer):
        components = (*components, WeightComponent(Part.OTHER, Division.REPLICATED, rest, "bf16"))
    return Speculative(told["method"], told["layers"], told["tokens"], components)
