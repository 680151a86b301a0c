"""Marlin's W4A16 mixture of experts (CUDA), from the library in vLLM's wheel.

third_party/peers/vllm/_moe_C_stable_libtorch.abi3.so. Its product and sort are used unchanged; its clamped SwiGLU is in
another, larger library and replaced by a small Triton kernel.
"""

# ruff: noqa: N803
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4_kernels.registry import Provider, register_provider

LIBRARY = Path("third_party/peers/vllm/_moe_C_stable_libtorch.abi3.so")
# vLLM's number for float4_e2m1f: exponent bits, mantissa bits, sign, "finite values only".
E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49


@triton.jit
def _activate(gate_up, out, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.minimum(tl.load(gate_up + row * 2 * WIDTH + column, mask=inside).to(tl.float32), limit)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out + row * WIDTH + column, (gate / (1.0 + tl.exp(-gate)) * up).to(tl.bfloat16), mask=inside)


def missing() -> str | None:
    return None if LIBRARY.exists() else f"{LIBRARY} is not there"


def _tile_order(device: torch.device) -> torch.Tensor:
    """Return the source of each of the 1024 codes of a 16 × 64 tile, in the order of Marlin's threads."""
    order = []
    for lane in range(32):
        rows = [2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1]
        eight = [16 * row + lane // 4 + 8 * block for block in (0, 1) for row in rows]
        for tile in range(4):
            order.append([p + 256 * tile for p in eight])
    index = torch.tensor(order, device=device)
    return index[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)


def _pack(weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/2] → int32 [K/16, 2N]."""
    n, k = weight.shape[0], weight.shape[1] * 2
    codes = torch.stack((weight & 15, weight >> 4), -1).reshape(n, k).T
    tiles = codes.reshape(k // 16, 16, n // 16, 16).permute(0, 2, 1, 3).reshape(-1, 1024)[:, order]
    eight = tiles.reshape(k // 16, 2 * n, 8).to(torch.int32)
    packed = eight[..., 0]
    for i in range(1, 8):
        packed = packed | (eight[..., i] << (4 * i))
    return packed.contiguous()


def _pack_scales(scale: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K/32] → float8_e8m0fnu [K/32, N] in Marlin's order."""
    n = scale.shape[0]
    order = [i + 8 * j for i in range(8) for j in range(8)]
    mixed = scale.T.reshape(-1, 64)[:, order].reshape(-1, 4)[:, [0, 2, 1, 3]]
    return mixed.reshape(-1, n).contiguous().view(torch.float8_e8m0fnu)


def make(params: Mapping[str, Any], device: torch.device) -> Callable[..., Any]:
    """Weights are repacked at the first call, which is not timed."""
    torch.ops.load_library(str(LIBRARY.resolve()))
    ops = torch.ops._moe_C
    tokens, hidden, inter, experts, topk = (params[n] for n in ("tokens", "hidden", "inter", "experts", "topk"))
    pairs = tokens * topk
    block = next((b for b in (8, 16, 32, 48, 64) if pairs / experts / b < 0.9), 64)
    most = pairs + experts * (block - 1)
    if pairs < experts:
        most = min(pairs * block, most)
    order = _tile_order(device)
    kept: dict[str, torch.Tensor] = {}

    def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    rows, tile = empty(most, dtype=torch.int32), empty(-(-most // block), dtype=torch.int32)
    count = empty(1, dtype=torch.int32)
    gate_up, h = empty(pairs, 2 * inter, dtype=torch.bfloat16), empty(pairs, inter, dtype=torch.bfloat16)
    y, out = empty(pairs, hidden, dtype=torch.bfloat16), empty(tokens, hidden, dtype=torch.bfloat16)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    workspace = torch.zeros(4 * sms, dtype=torch.int32, device=device)

    def product(a: torch.Tensor, c: torch.Tensor, which: str, weights: torch.Tensor, top: int, scaled: bool) -> None:
        m, (n, k) = a.shape[0], ((2 * inter, hidden) if which == "w13" else (hidden, inter))
        ops.moe_wna16_marlin_gemm(
            a, c, kept[which], None, kept[which + "_scale"], None, None, None, None, None, workspace, rows, tile, count,
            weights, block, top, scaled, E2M1, m, n, k, True, False, True, False, -1, -1, -1,
        )  # fmt: skip

    def call(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, **w: torch.Tensor) -> torch.Tensor:
        if not kept:
            for name in ("w13", "w2"):
                kept[name] = torch.stack([_pack(e, order) for e in w[name]])
                kept[name + "_scale"] = torch.stack([_pack_scales(e) for e in w[name + "_scale"]])
        ops.moe_align_block_size(topk_ids, experts, block, rows, tile, count, None)
        product(x, gate_up, "w13", topk_weights, topk, False)
        _activate[(pairs, triton.cdiv(inter, 1024))](gate_up, h, 10.0, inter, 1024)
        product(h, y, "w2", topk_weights, 1, True)
        torch.sum(y.view(tokens, topk, hidden), dim=1, out=out)
        return out

    return call


def register() -> None:
    register_provider("moe_w4a16", Provider("Marlin", missing, make))
