"""`dsv4 evidence`: everything that tells why a deployment died, in one file to keep or to attach to a report."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli.choose import the_one
from dsv4_operator.cli.errors import ExitCode, bad_input, explained
from dsv4_operator.cli.output import note

# The ends of logs that are still being written; what died before is in the evidence already, cut as well.
_TAIL_BYTES = 1024 * 1024
_PATTERNS = ("manifest.json", "object.json", "*.log", "evidence/**/*", "i*/plan.json", "i*/m*/*.log")


def pack(root: Path, name: str | None, output: Path | None) -> ExitCode:
    """Write the archive and name it."""
    state = the_one(root, name)
    target = output or Path(f"{state.name}-evidence-{time.strftime('%Y%m%dT%H%M%S')}.tar.gz")
    if target.is_dir():
        raise bad_input(f"--output {str(target)!r} is a directory; name a file in it, such as {state.name}.tar.gz")
    partial = target.with_name(f".{target.name}.part")
    with explained("cannot write"):
        try:
            with tarfile.open(partial, "w:gz") as archive:
                count = sum(_add(archive, state, path) for path in _files(state))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    note(f"{target}: {count} files, {target.stat().st_size / 1024:.0f} KiB; no prompts, no token")
    return ExitCode.OK


def _files(state: DeploymentState) -> Iterator[Path]:
    for pattern in _PATTERNS:
        yield from sorted(path for path in state.directory.glob(pattern) if path.is_file() and not path.is_symlink())


def _add(archive: tarfile.TarFile, state: DeploymentState, path: Path) -> int:
    """Add the end of a file under the deployment's name; 0 if it went away meanwhile."""
    try:
        with path.open("rb") as file:
            seen = path.stat()
            file.seek(max(0, seen.st_size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except FileNotFoundError:
        return 0
    entry = tarfile.TarInfo(f"{state.name}/{path.relative_to(state.directory)}")
    entry.size, entry.mtime, entry.mode = len(data), int(seen.st_mtime), 0o644
    archive.addfile(entry, io.BytesIO(data))
    return 1
