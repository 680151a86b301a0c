"""Events of the NVIDIA driver, on a machine that has one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_runtime.health.gpu import Gpus
from dsv4_runtime.health.samples import FATAL_XIDS

SECONDS = 20.0

ASTRAY = """
import torch, triton, triton.language as tl

@triton.jit
def write(address):
    tl.store(address.to(tl.pointer_type(tl.float32)), 1.0)

torch.cuda.init()
write[(1,)](0x7FFF_F000_0000)
torch.cuda.synchronize()
"""


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    found = Gpus()
    if not found.there:
        pytest.skip("no NVIDIA accelerator")
    yield found
    found.close()


def test_the_driver_reports_illegal_accesses_of_a_program_as_not_fatal_for_engines(gpus: Gpus, tmp_path: Path) -> None:
    assert {gpu.xid for gpu in gpus.sample()} == {None}
    script = tmp_path / "astray.py"
    script.write_text(ASTRAY)
    program = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert "illegal memory access" in program.stderr
    until = time.monotonic() + SECONDS
    while (told := [gpu.xid for gpu in gpus.sample() if gpu.xid is not None]) == [] and time.monotonic() < until:
        time.sleep(0.1)
    assert told
    assert not FATAL_XIDS & set(told)
    gpus.forget()
    assert {gpu.xid for gpu in gpus.sample()} == {None}


def test_values_of_an_accelerator_are_plausible(gpus: Gpus) -> None:
    for gpu in gpus.sample():
        # Unified memory has no memory figure; each card reports at least power or utilisation.
        assert (gpu.power_watts, gpu.utilization) != (None, None)
        assert gpu.power_watts is None or 1 < gpu.power_watts < 2000
        assert gpu.utilization is None or 0 <= gpu.utilization <= 1
        assert gpu.memory_used is None or gpu.memory_used > 0
