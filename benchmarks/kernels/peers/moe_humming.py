"""Humming's W4A16 mixture of experts (CUDA, compiled at run time), from its package: third_party/peers/humming.

Its two products run with its own choice of configurations, as in vLLM. The sort is vLLM's (from Marlin's library), and
small Triton kernels replace the activation and the weighted sum, as for Marlin.
"""

# ruff: noqa: N803
from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from benchmarks.kernels.peers import moe_marlin

from dsv4_kernels.registry import Provider, register_provider

ROOT = Path("third_party/peers/humming")


@triton.jit
def _weighted_sum(y, weights, out, WIDTH: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOPK):
        value = tl.load(y + (token * TOPK + j) * WIDTH + column, mask=column < WIDTH).to(tl.float32)
        total += value * tl.load(weights + token * TOPK + j)
    tl.store(out + token * WIDTH + column, total.to(tl.bfloat16), mask=column < WIDTH)


def missing() -> str | None:
    if not (ROOT / "humming" / "layer.py").exists():
        return f"{ROOT}/humming is not there"
    return moe_marlin.missing()


def _layer(weight: torch.Tensor, scale: torch.Tensor) -> Any:
    """Return a layer of Humming with weights [E, N, K/2] and scales [E, N, K/32], which it repacks."""
    from humming.layer import HummingLayer

    experts, rows, half = weight.shape
    layer = HummingLayer(
        shape_n=rows,
        shape_k=2 * half,
        weight_config={"quant_method": "mxfp4"},
        num_experts=experts,
        torch_dtype=torch.bfloat16,
    )
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
    layer.to(weight.device).transform()
    return layer


def make(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Weights are repacked and kernels compiled at the first call, which is not timed."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from humming.tune import get_heuristics_config

    torch.ops.load_library(str(moe_marlin.LIBRARY.resolve()))
    tokens, hidden, inter, experts, topk = (params[n] for n in ("tokens", "hidden", "inter", "experts", "topk"))
    pairs = tokens * topk
    gate_up = torch.empty((pairs, 2 * inter), dtype=torch.bfloat16, device=device)
    h = torch.empty((pairs, inter), dtype=torch.bfloat16, device=device)
    y = torch.empty((pairs, hidden), dtype=torch.bfloat16, device=device)
    out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=device)
    kept: dict[str, Any] = {}

    def sort(topk_ids: torch.Tensor, block: int) -> dict[str, torch.Tensor]:
        """Return vLLM's sort for tiles of `block` pairs; buffers are allocated once per block size."""
        if block not in kept["rows"]:
            most = min(pairs * block, pairs + experts * (block - 1))
            sizes = (most, -(-most // block), 1)
            kept["rows"][block] = [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]
        rows, tile, count = kept["rows"][block]
        torch.ops._moe_C.moe_align_block_size(topk_ids, experts, block, rows, tile, count, None)
        return {"sorted_ids": rows, "expert_ids": tile, "num_tokens_padded": count}

    def call(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, **w: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept["rows"] = {}
            for name in ("w13", "w2"):
                layer = _layer(w[name], w[name + "_scale"])
                tuning = get_heuristics_config(layer.humming_config, gemm_type="indexed")
                block = next((c["block_shape"][0] for low, high, c in tuning if low < pairs <= high), 64)
                kept[name] = (layer, json.dumps(tuning), block)
        compute = json.dumps({"gemm_type": "indexed"})
        (first, tuning1, block1), (second, tuning2, block2) = kept["w13"], kept["w2"]
        common = {"compute_config": compute, "valid_shape_m": pairs}
        plan1 = sort(topk_ids, block1)
        plan2 = plan1 if block1 == block2 else sort(topk_ids, block2)
        first(x, outputs=gate_up, top_k=topk, tuning_config=tuning1, **plan1, **common)
        moe_marlin._activate[(pairs, triton.cdiv(inter, 1024))](gate_up, h, 10.0, inter, 1024)
        second(h, outputs=y, top_k=1, tuning_config=tuning2, **plan2, **common)
        _weighted_sum[(tokens, triton.cdiv(hidden, 1024))](y, topk_weights, out, hidden, topk, 1024)
        return out

    return call


def register() -> None:
    register_provider("moe_w4a16", Provider("Humming", missing, make))
