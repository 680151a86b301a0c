"""Checkpoint contents: errors, the manifest with sizes and digests of all files, and checks of index and shards.

The manifest alone decides which files are fetched and whether their content is correct.
"""

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
from dsv4_runtime.util.files import open_regular


class WeightsError(Exception):
    """The weights are unavailable; the message contains reason and remedy."""

    def __init__(self, message: str, cause: Cause = Cause.STAGING_FAILED) -> None:
        super().__init__(message)
        self.cause = cause


class TransientError(Exception):
    """A transfer was interrupted; a retry may succeed."""

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after
        """Delay in seconds requested by the server."""


class NotAsDescribedError(Exception):
    """A complete file differs from its manifest entry."""


SUMS = "SHA256SUMS"
MAKE_SUMS = f"find . -type f ! -name {SUMS} -printf '%P\\0' | xargs -0 sha256sum > {SUMS}"
"""Shell command that creates it in a checkpoint's directory. `sha256sum *` would include an older one."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Weight formats besides safetensors, which vLLM is not configured to read.
_OTHER_FORMATS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"})


def relative(name: str) -> str:
    """Return `name` if it denotes a visible file below the checkpoint's directory; raise ValueError otherwise."""
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
    """File of a checkpoint."""

    name: Annotated[str, AfterValidator(relative)]
    """Path relative to the checkpoint's directory, with `/`."""
    size: int = Field(ge=0)
    """Bytes."""
    sha256: Annotated[str, AfterValidator(_sha256)] | None = None
    git_blob: str | None = None
    """Git's SHA-1 of the content; hubs provide it for small files, instead of a SHA-256."""
    tag: str | None = None
    """The origin's identifier of the content if it has no digest: an ETag."""

    @property
    def key(self) -> str:
        """Return an identifier of the content, so that parts of different contents are never combined."""
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
    """Incremental digests of one file's content."""

    def __init__(self, file: ManifestFile, sha256: str | None = None) -> None:
        """Args:
        file: manifest entry.
        sha256: expected SHA-256 if the manifest has none.
        """
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
        """Return the SHA-256 of the bytes so far."""
        return self._sha256.hexdigest()

    def mismatch(self) -> str | None:
        """Return the difference between actual and expected digest, else None."""
        if self._wanted and self._wanted != self.sha256:
            return f"SHA-256 {self.sha256} instead of {self._wanted}"
        if self._git and self._git.hexdigest() != self._file.git_blob:
            return f"git blob {self._git.hexdigest()} instead of {self._file.git_blob}"
        return None


def is_wanted(name: str) -> bool:
    """Return whether vLLM reads the file: not hidden, no other weight format, no checksum list."""
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.suffix not in _OTHER_FORMATS and path.name != SUMS


def parse_sums(text: str) -> dict[str, str]:
    """Parse a `SHA256SUMS` into file name and SHA-256; raise ValueError with the number of an invalid line."""
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
    """Return tensor name to file name from the index, if there is one; raise WeightsError if it is invalid."""
    path = folder / _INDEX
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read(path, _MAX_INDEX_BYTES))["weight_map"]
        return {str(tensor): relative(str(file)) for tensor, file in found.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{path} is not an index of safetensors: {error}", Cause.WEIGHTS_CORRUPT) from error


def shards(folder: Path, stages: tuple[int, int, int] | None = None) -> list[Path]:
    """Return the files with tensors in vLLM's read order.

    Args:
        folder: the checkpoint.
        stages: first and last pipeline stage of this node's ranks, and the number of stages; None: all layers.
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
    """Return the half-open layer range of the stages `first..last` as divided by vLLM
    (`distributed/utils.py:get_pp_indices`).

    Remaining layers go to the stages before the last, one each, from the back.
    """
    sizes = [count // stages] * stages
    for extra in range(2, count % stages + 2):
        sizes[-extra] += 1
    return sum(sizes[:first]), sum(sizes[: last + 1])


def check_files(folder: Path, remedy: str) -> None:
    """Check that the configuration and all shards exist, and that each shard has the length given in its header.

    Raises:
        WeightsError: names file and problem; the message ends with `remedy`.
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
            # Follow links: a hub's cache consists of links.
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
