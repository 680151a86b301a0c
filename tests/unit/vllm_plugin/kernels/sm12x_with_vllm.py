"""Child process of `test_sm12x.py`: stand-ins for FlashInfer and b12x, called by the installed vLLM's own classes.

Prints one JSON object.
"""

# ruff: noqa: E402 -- vLLM looks for the packages when it is imported
from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"

import sm12x_packages as packages

packages.install()

import torch
from vllm.model_executor.kernels.linear.scaled_mm import b12x as linear
from vllm.model_executor.layers.fused_moe import b12x as moe

from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import providers, trial
from dsv4_runtime.vllm_plugin.kernels.evidence import Trial

CPU = torch.device("cpu")
torch.cuda.synchronize = lambda device=None: None
torch.cuda.is_current_stream_capturing = lambda: False
platform = SimpleNamespace(is_cuda=lambda: True, is_device_capability_family=lambda family: family == 120)
platform.device_name = "card"
linear.current_platform = moe.current_platform = platform  # type: ignore[attr-defined,assignment]
providers.capability = lambda: (12, 0)

DECODE = {"tokens": 5, "heads": 13, "window": 128, "topk": 96}
PREFILL = {"tokens": 70, "heads": 8, "width": 384, "window": 128, "rows": 500, "packed": True}
LINEAR = {"tokens": 3, "n": 256, "k": 384}
EXPERTS = {"tokens": 4, "hidden": 256, "inter": 64, "experts": 16, "topk": 6}


def tried(op: Op, name: str, operation: str, **params: Any) -> dict[str, Any]:
    """Return the output of a provider's process, the arguments of the package, and whether the call would be timed."""
    packages.CALLS.clear()
    seen, call = trial.try_one(op, name, Trial(op, "t", operation, params), CPU)
    if call is not None:
        call()
    return {"seen": seen.to_dict(), "calls": list(packages.CALLS), "timed": call is not None}


def main() -> None:
    found = {
        "decode": tried(Op.MLA_DECODE, "flashinfer", "mla_decode", **DECODE),
        "window": tried(Op.MLA_DECODE, "flashinfer", "mla_decode", **{**DECODE, "topk": 0}),
        "prefill": tried(Op.MLA_PREFILL, "flashinfer", "mla_prefill", **PREFILL),
        "linear": tried(Op.FP8_LINEAR, "b12x", "fp8_gemm", **LINEAR),
        "experts": tried(Op.MOE, "b12x", "moe_w4a16", **EXPERTS),
        "other window": tried(Op.MLA_DECODE, "flashinfer", "mla_decode", **{**DECODE, "window": 96}),
        "odd product": tried(Op.FP8_LINEAR, "b12x", "fp8_gemm", **{**LINEAR, "n": 192}),
    }
    packages.FACTOR[0] = 1.01
    found["rough"] = tried(Op.MLA_DECODE, "flashinfer", "mla_decode", **DECODE)
    packages.FACTOR[0] = 1.0
    # As if the packages had other versions.
    flashinfer, blockscaled, fused = (
        packages.sys.modules[name] for name in ("flashinfer.decode", "b12x.gemm.blockscaled", "b12x.moe.fused_moe")
    )
    vars(flashinfer)[packages.trtllm_batch_decode_sparse_mla_dsv4.__name__] = lambda query, kv_cache: None
    vars(blockscaled)["mm_block_fp8"] = lambda a, a_scale, b, b_scale: None
    vars(fused)["Caps"] = lambda max_tokens, num_topk, device, weight_plan, quant_mode: None
    found["other decode"] = tried(Op.MLA_DECODE, "flashinfer", "mla_decode", **DECODE)
    found["other linear"] = tried(Op.FP8_LINEAR, "b12x", "fp8_gemm", **LINEAR)
    found["other experts"] = tried(Op.MOE, "b12x", "moe_w4a16", **EXPERTS)
    platform.is_device_capability_family = lambda family: False
    found["not for b12x"] = tried(Op.MOE, "b12x", "moe_w4a16", **EXPERTS)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
