"""vLLM's norm of the query's low-rank part and the KV row, with the FP8 codes that the products of the query take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsv4_kernels.front.api import NormPlan
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import codes
from dsv4_runtime.vllm_plugin.kernels.active import shared_plan


def with_codes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's `fused_q_kv_rmsnorm`, whose query comes with its codes where a product takes them."""

    @functools.wraps(original)
    def fused_q_kv_rmsnorm(
        qr: torch.Tensor, kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
    ) -> Any:
        (tokens, rank), device = qr.shape, qr.device
        most = codes.wanted(rank)
        if tokens > most or kv.shape[1] != 512 or qr.dtype != torch.bfloat16:
            return original(qr, kv, q_weight, kv_weight, eps)
        plan = shared_plan(
            (Op.FP8_LINEAR, "query norm", rank, most, device), lambda: NormPlan(most, rank, device, quantised=True)
        )
        normed, row = plan.run(qr=qr, kv=kv, q_weight=q_weight, kv_weight=kv_weight, eps=eps)
        return codes.give(normed, plan.codes(tokens)), row

    return fused_q_kv_rmsnorm
