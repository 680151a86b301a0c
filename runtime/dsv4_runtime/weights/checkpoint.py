"""Facts from a checkpoint's own files: which shards there must be, whether each is whole, which layers it has."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dsv4_runtime.contract import Cause, Report
from dsv4_runtime.contract.files import open_regular


class WeightsError(Exception):
    """The weights are not there and cannot be had; the text says why and what to do."""

    def __init__(self, message: str, cause: Cause = Cause.STAGING_FAILED) -> None:
        super().__init__(message)
        self.cause = cause


class TransientError(Exception):
    """A transfer was cut off; trying again may help."""

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after
        """Seconds that the other side asked to wait."""


class NotAsDescribedError(Exception):
    """A whole file came, and it is not the one that the manifest describes."""


SUMS = "SHA256SUMS"
MAKE_SUMS = f"find . -type f ! -name {SUMS} -printf '%P\\0' | xargs -0 sha256sum > {SUMS}"
"""Shell command that makes it in the directory of a checkpoint. `sha256sum *` would list an older one too."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Weights in formats that vLLM is not asked to read, beside safetensors in many repositories.
_OTHER_FORMATS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"})


def relative(name: str) -> str:
    """Return `name` if it is that of a file below the checkpoint's directory.

    Raises:
        ValueError: it leads elsewhere, or is hidden.
    """
    path = PurePosixPath(name)
    parts = path.parts
    if not parts or path.is_absolute() or str(path) != name or "\\" in name or not name.isprintable():
        raise ValueError(f"{name!r} is not a relative file name")
    if any(part.startswith(".") for part in parts):
        raise ValueError(f"{name!r} leaves the directory or is hidden")
    return name


def _sha256(value: str) -> str:
    if not _SHA256.fullmatch(value):
        raise ValueError(f"{value!r} is not a SHA-256; it has 64 hex digits")
    return value


class ManifestFile(Report):
    """One file."""

    name: Annotated[str, AfterValidator(relative)]
    """Path below the checkpoint's directory, with `/`."""
    size: int = Field(ge=0)
    """Bytes."""
    sha256: Annotated[str, AfterValidator(_sha256)] | None = None
    git_blob: str | None = None
    """SHA-1 that git gives the content; hubs have it for small files, which have no SHA-256 there."""
    tag: str | None = None
    """Name that the origin has for this content, where it has no digest of it: an ETag."""

    @property
    def key(self) -> str:
        """Name the content, so that a part of it is never continued with another one."""
        content = self.sha256 or self.git_blob or self.tag or ""
        return hashlib.sha256(f"{self.name}\n{self.size}\n{content}".encode()).hexdigest()[:12]


class CheckpointManifest(Report):
    """All files of a checkpoint."""

    version: Literal["dsv4.dev/weights/v1"] = "dsv4.dev/weights/v1"
    identity: str
    """`WeightsPlan.identity` of the checkpoint."""
    files: tuple[ManifestFile, ...]

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)


class Digest:
    """The digests of one file's content, computed as it passes."""

    def __init__(self, file: ManifestFile, sha256: str | None = None) -> None:
        """Take `sha256`, which is what the content must have if the manifest has none."""
        self._file = file
        self._wanted = file.sha256 or sha256
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(usedforsecurity=False) if file.git_blob else None
        if self._git:
            self._git.update(b"blob %d\0" % file.size)

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        self._sha256.update(data)
        if self._git:
            self._git.update(data)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of what came so far."""
        return self._sha256.hexdigest()

    def mismatch(self) -> str | None:
        """Say in what the whole content differs from what it should be; None if it is right."""
        if self._wanted and self._wanted != self.sha256:
            return f"SHA-256 {self.sha256} instead of {self._wanted}"
        if self._git and self._git.hexdigest() != self._file.git_blob:
            return f"git blob {self._git.hexdigest()} instead of {self._file.git_blob}"
        return None


def is_wanted(name: str) -> bool:
    """Return whether vLLM reads a file of a source: not hidden, no weights in other formats, no list of sums."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.suffix not in _OTHER_FORMATS and path.name != SUMS


def parse_sums(text: str) -> dict[str, str]:
    """Read a `SHA256SUMS` as `sha256sum` writes it: name to SHA-256.

    Raises:
        ValueError: a line is not of that form; the text names it.
    """
    sums: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        digest, separator, name = line.partition(" ")
        name = name.removeprefix(" ").removeprefix("*").removeprefix("./")
        if not separator or not _SHA256.fullmatch(digest.lower()) or not name:
            raise ValueError(f"line {number} is not `<SHA-256>  <file>`; make it anew with `{MAKE_SUMS}`")
        sums[name] = digest.lower()
    return sums


_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MAX_HEADER_BYTES = 100 << 20
_MAX_INDEX_BYTES = 256 << 20


def weight_map(folder: Path) -> dict[str, str]:
    """Map tensor name to file name, as the index says; empty if there is no index.

    Raises:
        WeightsError: the index cannot be read.
    """
    path = folder / _INDEX
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read(path, _MAX_INDEX_BYTES))["weight_map"]
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


def check_files(folder: Path, remedy: str) -> None:
    """Check that configuration and all shards are there, and each shard as long as its header says; read no tensor.

    Raises:
        WeightsError: names the file and what is wrong with it; `remedy` ends the sentence.
    """
    if not (folder / "config.json").is_file():
        raise WeightsError(f"{folder} has no config.json; {remedy}")
    files = shards(folder)
    if not files:
        raise WeightsError(f"{folder} has no *.safetensors; {remedy}")
    for path, wrong in _broken_shards(files):
        raise WeightsError(f"{path} {wrong}; {remedy}", Cause.WEIGHTS_CORRUPT)


def _read(path: Path, longest: int) -> bytes:
    with os.fdopen(open_regular(path, follow=True), "rb") as stream:
        data = stream.read(longest + 1)
    if len(data) > longest:
        raise ValueError(f"it has more than {longest >> 20} MiB")
    return data


def _broken_shards(files: list[Path]) -> Iterator[tuple[Path, str]]:
    for path in files:
        try:
            # Links are followed: in a hub's own cache every file is one.
            with os.fdopen(open_regular(path, follow=True), "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                head = stream.read(8)
                length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
                if not 0 < length <= min(size, _MAX_HEADER_BYTES):
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
