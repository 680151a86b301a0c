"""Reads what the planner wants to know of a checkpoint: its configuration and the headers of its files."""

from __future__ import annotations

import json
import struct
from pathlib import Path, PurePosixPath
from typing import Any

from dsv4_operator.api import ModelSpec, Variant
from dsv4_operator.planning.catalog import Model, checkpoint_named
from dsv4_operator.planning.catalog.checkpoint import BadCheckpoint, model_from_files, model_of_config

_HEADER_LIMIT = 100 * 2**20  # safetensors' own


def model_here(spec: ModelSpec) -> Model | None:
    """Return the model that a deployment names by its path, from its files or its `config.json` alone.

    None if neither is on this machine, or the name says which of those with that configuration it is.

    Raises:
        BadCheckpoint: the files are there and cannot be understood; the text names the file.
    """
    place = spec.source.path or spec.source.shared_path
    if place is None:
        return None
    found = None if spec.source.path is None else read_checkpoint(Path(place), spec.variant)
    config = Path(place) / "config.json"
    unnamed = spec.variant is not Variant.NANO and spec.checkpoint is None and checkpoint_named(place) is None
    if found is None and unnamed and config.is_file():
        found = model_of_config(str(place), _json(config))
    if found is not None and found.variant != spec.variant:
        raise BadCheckpoint(
            f"spec.model.variant: {spec.variant} contradicts {config}, which is of {found.variant}; write that"
        )
    return found


def read_checkpoint(folder: Path, variant: str) -> Model | None:
    """Return the checkpoint in `folder`; None if files of it are missing.

    Raises:
        BadCheckpoint: a file cannot be understood.
    """
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    if not config.is_file() or not index.is_file():
        return None
    told = _json(index).get("weight_map")
    if not isinstance(told, dict):
        raise BadCheckpoint(f"{index} has no weight_map; download the file again")
    files = sorted({str(name) for name in told.values()})
    if outside := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise BadCheckpoint(f"{index} names {outside[0]!r}, which is not in that directory; download the file again")
    if not all((folder / name).is_file() for name in files):
        return None
    return model_from_files(str(folder), variant, _json(config), {name: _header(folder / name) for name in files})


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path} cannot be read as JSON ({error}); download the file again") from None
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{path} holds no JSON object; download the file again")
    return found


def _header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: 8 bytes of length, little-endian, then JSON."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            found = json.loads(file.read(min(size, _HEADER_LIMIT)))
        ends = [tensor["data_offsets"][1] for name, tensor in found.items() if name != "__metadata__"]
        whole = 8 + size + max(ends, default=0)
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"{path} is not a safetensors file ({error}); download it again") from None
    if (length := path.stat().st_size) != whole:
        raise BadCheckpoint(f"{path} has {length} bytes, and its header says {whole}; download it again")
    return dict(found)
