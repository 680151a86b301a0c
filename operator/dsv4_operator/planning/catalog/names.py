"""Lookup of the catalog's checkpoint that a deployment's source is, by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsv4_operator.api import ModelSource, ModelSpec, NanoSource, Precision, SpeculativeMethod, Variant
from dsv4_operator.api.values import quoted
from dsv4_operator.planning.catalog.models import model, models
from dsv4_operator.planning.catalog.records import Model

_HASH = re.compile(r"[0-9a-f]{7,64}")
_PLACES = frozenset({"snapshots", "main", "model", "models", "weights", "checkpoint", "checkpoints", "hub"})
"""Directories that say nothing about what is in them."""
_CACHED = "models--"
"""Beginning of a repository's directory in the Hub's cache, with `--` for its `/`."""


class UnknownCheckpoint(ValueError):
    """A source whose name is none of the catalog's, or contradicts the specification; the text has field and remedy."""


def model_for(spec: ModelSpec) -> Model:
    """Return the checkpoint that a deployment names: by `checkpoint`, else by the name in its source.

    Raises:
        UnknownCheckpoint: the name is none that the catalog has, or is that of another variant.
    """
    if spec.source.nano is not None:
        return model(_nano(spec.source.nano))
    if spec.variant is Variant.NANO:
        return model("Nano")
    field, name = ("spec.model.checkpoint", spec.checkpoint) if spec.checkpoint else _named(spec.source)
    found = checkpoint_named(name)
    if found is None:
        known = ", ".join(each.name for each in models() if each.repo)
        remedy = "use one of" if spec.checkpoint else "set spec.model.checkpoint to what it is, one of"
        raise UnknownCheckpoint(f"{field}: {quoted(name)} is no checkpoint that dsv4 knows; {remedy} {known}")
    if found.variant != spec.variant:
        raise UnknownCheckpoint(
            f"spec.model.variant: {spec.variant} contradicts {field} {quoted(name)}, which is {found.name}; "
            f"write {found.variant}"
        )
    return found


def _nano(made: NanoSource) -> str:
    precision = "-fp8" if made.precision is Precision.FP8 else ""
    return f"Nano{precision}" + (f"-{made.drafts}" if made.drafts is not SpeculativeMethod.NONE else "")


def checkpoint_named(name: str) -> Model | None:
    """Return the checkpoint whose repository or name ends `name`, a path or URL, in any case; None if there is none."""
    last = next((_bare(part) for part in _parts(name)), "")
    return next((found for found in models() if found.repo and last == _bare(found.name)), None)


def _named(source: ModelSource) -> tuple[str, str]:
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


def _parts(name: str) -> Iterator[str]:
    """Yield the parts of a path that may name a checkpoint, the last first."""
    for part in reversed(name.lower().split("/")):
        if part and part not in _PLACES and not _HASH.fullmatch(part):
            yield part.rsplit("--", 1)[-1] if part.startswith(_CACHED) else part


def _bare(name: str) -> str:
    return name.lower().replace("_", "-").removeprefix("deepseek-")
