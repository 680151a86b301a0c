"""Docker archives of images with one static program and nothing else."""

from __future__ import annotations

import io
import json
import os
import tarfile
from hashlib import sha256
from pathlib import Path

PAUSE = "dsv4.test/pause:1"
"""Image that holds the namespaces of every pod."""
PROBE = "dsv4.test/probe:1"
"""Image that serves HTTP, sends HTTP requests, and resolves names (go/kubernetes/probe)."""


def write(file: Path, image: str, program: Path) -> Path:
    """Write an archive of an image whose entry point is `program`."""
    layer = _tar({program.name: program.read_bytes()}, mode=0o755)
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [image], "Layers": ["layer.tar"]}]
    file.write_bytes(
        _tar(
            {
                "config.json": json.dumps(config).encode(),
                "layer.tar": layer,
                "manifest.json": json.dumps(manifest).encode(),
            }
        )
    )
    return file


def _tar(files: dict[str, bytes], *, mode: int = 0o644) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            made.addfile(entry, io.BytesIO(content))
    return out.getvalue()
