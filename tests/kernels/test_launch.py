"""Launches without Triton's own search, compared with Triton's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4_kernels.fp8.kernel import fp8_quant_kernel
from dsv4_kernels.plan import Launcher

HERE = Path(__file__).parent
KIT = HERE.parent / "kit"


@pytest.mark.parametrize("arch", ["sm_90", "sm_121"])
def test_launches_equal_those_of_triton(tmp_path: Path, arch: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(KIT), os.environ.get("PYTHONPATH"))))
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, str(HERE / "launcher_and_triton.py"), arch]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=True)
    found = json.loads(told.stdout)
    assert found["plans"] == []
    assert found["kinds"] == []
    assert found["keys"] == []
    assert [text.partition(", needs")[0] for text in found["refused"]] == [
        "sum_kernel: x_ptr is on meta",
        "sum_kernel: y_ptr is on meta",
    ]
    assert found["waits"] == [False, True, True]
    assert found["triton"] == 0, "what was launched before goes the short way"


def test_arguments_have_the_kernels_order() -> None:
    x, code, scale = torch.zeros((1, 128), dtype=torch.bfloat16), *(torch.zeros(128, dtype=torch.uint8),) * 2
    with pytest.raises(TypeError, match=r"fp8_quant_kernel got .*needs the order .*x_ptr"):
        Launcher(fp8_quant_kernel)[(1,)](
            code_ptr=code, x_ptr=x, scale_ptr=scale, tokens=1, K=128, BLOCK_T=1, BLOCK_K=128
        )
