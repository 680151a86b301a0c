"""`dsv4 evidence`: pack the files that explain a deployment's failures into an archive."""

from __future__ import annotations

import io
import os
import tarfile
import time
from pathlib import Path

from dsv4_operator.cli.errors import ExitCode, bad_input, convert_os_errors
from dsv4_operator.cli.output import note
from dsv4_operator.cli.sources.base import DeploymentSource


def pack(source: DeploymentSource, name: str | None, output: Path | None) -> ExitCode:
    """Write the archive and print its path."""
    name, files = source.evidence(name)
    target = output or Path(f"{name}-evidence-{time.strftime('%Y%m%dT%H%M%S')}.tar.gz")
    if target.is_dir():
        raise bad_input(f"--output {str(target)!r} is a directory; name a file in it, such as {name}.tar.gz")
    partial = target.with_name(f".{target.name}.part")
    count = 0
    with convert_os_errors("cannot write"):
        try:
            with (
                open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file,
                tarfile.open(fileobj=file, mode="w:gz") as archive,
            ):
                for count, each in enumerate(files, start=1):  # noqa: B007
                    entry = tarfile.TarInfo(f"{name}/{each.path}")
                    entry.size, entry.mtime, entry.mode = len(each.data), int(each.modified), 0o600
                    archive.addfile(entry, io.BytesIO(each.data))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    note(f"{target}: {count} files, {target.stat().st_size / 1024:.0f} KiB; no prompts, no token")
    return ExitCode.OK
