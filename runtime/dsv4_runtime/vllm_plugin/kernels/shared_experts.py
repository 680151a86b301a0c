"""The shared experts' activation of vLLM's DeepSeek-V4, and the quantisation for their second product, in one launch.

The activation's result is written in bf16 too, since a layer that stands before the product may read it.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4_kernels.fp8.api import SiluMulPlan, silu_places
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import codes
from dsv4_runtime.vllm_plugin.kernels.active import shared_plan
from dsv4_runtime.vllm_plugin.kernels.precompile import DEVICE, announce


def prepare(mlp: Any) -> None:
    """Note on `mlp`, a `DeepseekV4MLP`, where its activation clamps; nothing if it is another one than known here."""
    act = mlp.act_fn
    # Exactly these: vLLM's class with a clamp has further parameters, which others of its models set.
    plain = getattr(act, "alpha", 1.0) == 1.0 and getattr(act, "beta", 0.0) == 0.0
    if type(act).__name__ in ("SiluAndMul", "SiluAndMulWithClamp") and plain:
        mlp.dsv4_limit = float(getattr(act, "swiglu_limit", "inf"))
    width = int(mlp.down_proj.input_size_per_partition)
    if codes.wanted(width):
        announce(SiluMulPlan, codes.wanted(width), width, DEVICE)


def activation(mlp: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """Return what the second product of `mlp` gets, bf16 [T, K], of gate_up [T, 2K]."""
    tokens, width = gate_up.shape[0], gate_up.shape[-1] // 2
    limit = getattr(mlp, "dsv4_limit", None)
    if limit is None or gate_up.dim() != 2 or tokens > codes.wanted(width) or gate_up.dtype != torch.bfloat16:
        found: torch.Tensor = mlp.act_fn(gate_up)
        return found
    most, device = codes.wanted(width), gate_up.device
    plan = shared_plan((Op.FP8_LINEAR, "silu", width, most, device), lambda: SiluMulPlan(most, width, device))
    y, code, scale = plan.run(x=gate_up, limit=limit, out=silu_places(tokens, width, device))
    return codes.give(y, (code, scale))
