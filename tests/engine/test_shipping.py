"""`dsv4 kernels compile` of the nano model with vLLM's own kernels, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4_runtime.nano.recipe import Precision, model_config, recipe_for

pytestmark = pytest.mark.engine


@pytest.mark.long
def test_the_kernels_of_a_model_are_compiled_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config(recipe_for(Precision.FP8))))
    command = [sys.executable, "-m", "dsv4_runtime.vllm_plugin.kernels.shipping", str(tmp_path), "--arch", "sm_121"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "shipped"), "--requests", "2", "--processes", "2", "--context", "1024"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Modules of vLLM's attention need operators that its build for CPU does not have.
    others = [one for one in done.stderr.splitlines() if "cutlass_scaled_mm_supports_block_fp8" not in one]
    assert others == []
    manifest = json.loads((tmp_path / "shipped/sm_121/manifest.json").read_text())
    names = {name.removesuffix(".json") for name in manifest["kernels"].values()}
    assert {"fp8_gemm_kernel", "router_product_kernel", "mla_prefill_kernel", "mhc_mix_kernel"} <= names
    # Of vLLM's runner, sampler and layers.
    assert {"_post_update_kernel", "_gumbel_sample_kernel", "_topk_topp_kernel"} <= names
    assert len(manifest["kernels"]) > 100
