"""`dsv4 evidence`: everything that tells why a deployment died, in one file to keep or to attach to a report."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli.errors import ExitCode, bad_input, explained
from dsv4_operator.cli.output import note
from dsv4_operator.cli.source import DeploymentSource, Piece

TAIL_BYTES = 1024 * 1024
"""Of logs that are still being written; what died before is in the evidence already, cut as well."""
_OF_GROUP = ("evidence/**/*", "i*/plan.json", "i*/m*/*.log")
_PATTERNS = ("manifest.json", "object.json", "*.log", *_OF_GROUP, *(f"g*/{pattern}" for pattern in _OF_GROUP))


def pack(source: DeploymentSource, name: str | None, output: Path | None) -> ExitCode:
    """Write the archive and name it."""
    name, pieces = source.evidence(name)
    target = output or Path(f"{name}-evidence-{time.strftime('%Y%m%dT%H%M%S')}.tar.gz")
    if target.is_dir():
        raise bad_input(f"--output {str(target)!r} is a directory; name a file in it, such as {name}.tar.gz")
    partial = target.with_name(f".{target.name}.part")
    count = 0
    with explained("cannot write"):
        try:
            with (
                open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file,
                tarfile.open(fileobj=file, mode="w:gz") as archive,
            ):
                for count, piece in enumerate(pieces, start=1):  # noqa: B007
                    entry = tarfile.TarInfo(f"{name}/{piece.path}")
                    entry.size, entry.mtime, entry.mode = len(piece.data), int(piece.modified), 0o600
                    archive.addfile(entry, io.BytesIO(piece.data))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    note(f"{target}: {count} files, {target.stat().st_size / 1024:.0f} KiB; no prompts, no token")
    return ExitCode.OK


def pieces(state: DeploymentState) -> Iterator[Piece]:
    """Yield the evidence that is in the files of a deployment of this machine."""
    for pattern in _PATTERNS:
        for path in sorted(state.directory.glob(pattern)):
            if not path.is_file() or path.is_symlink():
                continue
            try:
                with path.open("rb") as file:
                    seen = path.stat()
                    file.seek(max(0, seen.st_size - TAIL_BYTES))
                    data = file.read(TAIL_BYTES)
            except FileNotFoundError:
                # It went away meanwhile.
                continue
            yield Piece(str(path.relative_to(state.directory)), data, seen.st_mtime)
