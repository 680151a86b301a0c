"""Compare the kernels compiled without a GPU with those that a process with this GPU requests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from page import Page

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from dsv4_kernels.arch import detect, multiprocessors  # noqa: E402
from dsv4_testkit.plans import FLASH  # noqa: E402

_HEADS = ("plans", "compiled ahead", "seconds", "compiled by the process with the GPU")
_WARM_UP = """
import sys
import torch
from dsv4_kernels.precompile import make_plan

with torch.inference_mode():
    for one in sys.stdin.read().splitlines():
        make_plan(one, torch.device("cuda")).warmup()
torch.cuda.synchronize()
"""


def kernels(cache: Path) -> set[str]:
    return {found.parent.name for found in cache.glob("*/*.cubin")}


def test_an_engine_finds_all_that_was_compiled_ahead(tmp_path: Path, page: Page) -> None:
    arch = detect("cuda")
    if arch is None:
        pytest.skip("no table of configurations for this GPU")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "dsv4_kernels.precompile", arch, str(multiprocessors("cuda", arch))]
    begun = time.monotonic()
    subprocess.run(
        [*command, "--processes", "4"], input="\n".join([*FLASH, "", ""]), env=environment, text=True, timeout=300,
        check=True,
    )  # fmt: skip
    seconds = time.monotonic() - begun
    ahead = kernels(tmp_path)
    subprocess.run(
        [sys.executable, "-c", _WARM_UP], input="\n".join(FLASH), env=environment, text=True, timeout=300, check=True
    )
    more = kernels(tmp_path) - ahead
    page.row("Compiled ahead", _HEADS, len(FLASH), len(ahead), f"{seconds:.1f}", len(more))
    assert ahead
    assert not more
