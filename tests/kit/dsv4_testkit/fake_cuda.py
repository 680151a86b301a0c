"""Builds the stand-in for NVIDIA's driver library, `fake_cuda.c`; its head lists the settings."""

from __future__ import annotations

import subprocess
from pathlib import Path

FUNCTIONS_OF_COPIES = ("cuMemsetD8_v2", "cuMemcpyPeer", "cuLaunchKernel", "cuMemcpyDtoH_v2", "cuCtxEnablePeerAccess")


def build_cuda(folder: Path) -> Path:
    """Compile the library to `folder`, an entry for `LD_LIBRARY_PATH`; return `folder`."""
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", folder / "libcuda.so.1", source], check=True)
    return folder
