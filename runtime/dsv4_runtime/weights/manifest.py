"""Files of a checkpoint with sizes and digests: they alone decide what is fetched and what is right."""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dsv4_runtime.contract import Report

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
