"""Norms, RoPE and the window's cache entry in torch; see the package docstring."""

from __future__ import annotations

import torch

from dsv4_kernels.fp8.reference import fp8_quant
from dsv4_kernels.mla_cache.reference import mla_cache_write


def _norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def front_norm(
    qr: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (qr bf16 [T, Q], kv bf16 [T, 512]); exact: float64."""
    results = _norm(qr, eps) * q_weight.double(), _norm(kv, eps) * kv_weight.double()
    return results if exact else (results[0].bfloat16(), results[1].bfloat16())


def front_norm_o8(
    qr: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    exact: bool = False,
) -> tuple[torch.Tensor, ...]:
    """`front_norm`, and its qr quantised once it is rounded → (qr, kv, code, scale)."""
    results = front_norm(qr, kv, q_weight, kv_weight, eps, exact)
    return (*results, *fp8_quant(results[0].bfloat16()))


def _rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """The last 64 of x float64 [T, ·, 512], as interleaved pairs, turned by the angles of positions [T]."""
    cos, sin = cos_sin_cache[positions].double()[:, None].split(32, -1)
    even, odd = x[..., 448::2], x[..., 449::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :448], turned), -1)


def front_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    padded_heads: int,
    eps: float,
    page: int,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the entries into kv_cache in place; return (q bf16 [T, padded_heads, 512], kv_cache); exact: q float64."""
    tokens, heads, _ = q.shape
    out = torch.zeros((tokens, padded_heads, 512), dtype=torch.float64, device=q.device)
    out[:, :heads] = _rotate(_norm(q, eps), positions, cos_sin_cache)
    count = slot_mapping.shape[0]
    rows = _rotate(kv[:count, None].double(), positions[:count], cos_sin_cache)[:, 0]
    # Through float32, as every result is rounded.
    mla_cache_write(rows.float().bfloat16(), slot_mapping, kv_cache, page)
    return out if exact else out.bfloat16(), kv_cache
