"""Facts from a checkpoint's own files: which shards there must be, whether each is whole, which layers it has."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from dsv4_runtime.contract import Cause
from dsv4_runtime.util.files import open_regular
from dsv4_runtime.weights.errors import WeightsError
from dsv4_runtime.weights.manifest import relative

_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_LONGEST_HEADER = 100 << 20
_LONGEST_INDEX = 256 << 20


def weight_map(folder: Path) -> dict[str, str]:
    """Map tensor name to file name, as the index says; empty if there is no index.

    Raises:
        WeightsError: the index cannot be read.
    """
    path = folder / _INDEX
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read(path, _LONGEST_INDEX))["weight_map"]
        return {str(tensor): relative(str(file)) for tensor, file in found.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{path} is not an index of safetensors: {error}", Cause.WEIGHTS_CORRUPT) from error


def shards(folder: Path, stages: tuple[int, int, int] | None = None) -> list[Path]:
    """Return the files that hold tensors, in the order in which vLLM reads them.

    Args:
        folder: the checkpoint.
        stages: first and last pipeline stage of this node's ranks, and how many there are; None: all layers.
    """
    tensors = weight_map(folder)
    if not tensors:
        return sorted(folder.glob("*.safetensors"))
    if stages is not None and stages[2] > 1:
        found = [int(match[1]) for name in tensors if (match := _LAYER.search(name))]
        first, last = _layers(max(found, default=-1) + 1, *stages)
        tensors = {
            name: file
            for name, file in tensors.items()
            if (match := _LAYER.search(name)) is None or first <= int(match[1]) < last
        }
    return [folder / file for file in sorted(set(tensors.values()))]


def _layers(count: int, first: int, last: int, stages: int) -> tuple[int, int]:
    """Return the layers of the stages `first..last`, end excluded, as vLLM divides them
    (`distributed/utils.py:get_pp_indices`).

    What does not divide evenly goes to the stages before the last, one layer each, from the back.
    """
    sizes = [count // stages] * stages
    for extra in range(2, count % stages + 2):
        sizes[-extra] += 1
    return sum(sizes[:first]), sum(sizes[: last + 1])


def check(folder: Path, remedy: str) -> None:
    """Check that configuration and all shards are there, and each shard as long as its header says; read no tensor.

    Raises:
        WeightsError: names the file and what is wrong with it; `remedy` ends the sentence.
    """
    if not (folder / "config.json").is_file():
        raise WeightsError(f"{folder} has no config.json; {remedy}")
    files = shards(folder)
    if not files:
        raise WeightsError(f"{folder} has no *.safetensors; {remedy}")
    for path, wrong in _wrong(files):
        raise WeightsError(f"{path} {wrong}; {remedy}", Cause.WEIGHTS_CORRUPT)


def _read(path: Path, longest: int) -> bytes:
    with os.fdopen(open_regular(path, follow=True), "rb") as stream:
        data = stream.read(longest + 1)
    if len(data) > longest:
        raise ValueError(f"it has more than {longest >> 20} MiB")
    return data


def _wrong(files: list[Path]) -> Iterator[tuple[Path, str]]:
    for path in files:
        try:
            # Links are followed: in a hub's own cache every file is one.
            with os.fdopen(open_regular(path, follow=True), "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                head = stream.read(8)
                length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
                if not 0 < length <= min(size, _LONGEST_HEADER):
                    yield path, "is not a safetensors file"
                    continue
                entries = json.loads(stream.read(length))
            end = max(
                (entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"), default=0
            )
        except FileNotFoundError:
            yield path, "is missing, although the index lists it"
        except OSError as error:
            yield path, f"cannot be read: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError):
            yield path, "is not a safetensors file"
        else:
            if size != 8 + length + end:
                yield path, f"has {size} bytes instead of {8 + length + end}"
