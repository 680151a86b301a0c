"""The merges in torch, float64 inside."""

from __future__ import annotations

import torch

from dsv4_kernels.numerics import quantize_e4m3

O8_FLOOR = 1e-10


def inverse_rope(o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last 64 of o [T, H, 512] back by interleaved pairs; float64."""
    cos, sin = cos_sin[positions].double()[:, None, :].chunk(2, -1)
    even, odd = o[..., 448::2].double(), o[..., 449::2].double()
    rotated = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)
    return torch.cat((o[..., :448].double(), rotated), -1)


def mla_merge(
    o: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """o bf16 [S, T, H, 512], lse float32 [S, T, H], sink float32 [H] → (o [T, H, 512], lse [T, H])."""
    lse = torch.where(torch.isinf(lse), -torch.inf, lse.double())
    empty = lse == -torch.inf
    whole = torch.logsumexp(lse, 0)
    weight = torch.exp(lse - whole.masked_fill(whole == -torch.inf, 0.0))
    parts = torch.where(empty[..., None], 0.0, o.double())
    merged = (weight[..., None] * parts).sum(0)
    share = torch.where(whole == -torch.inf, 0.0, 1.0 / (1.0 + torch.exp(sink.double() - whole)))
    merged = merged * share[..., None]
    return (merged, whole) if exact else (merged.to(torch.bfloat16), whole.float())


def mla_merge_two(
    o0: torch.Tensor, lse0: torch.Tensor, o1: torch.Tensor, lse1: torch.Tensor, sink: torch.Tensor, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two subsets held apart, [T, H, 512] and [T, H] each."""
    return mla_merge(torch.stack((o0, o1)), torch.stack((lse0, lse1)), sink, exact)


def mla_merge_o8(
    o: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge, rotate back, quantise: → (code uint8 [T, H, 512], scale uint8 [T, H, 4]); `exact` changes nothing."""
    merged, _ = mla_merge(o, lse, sink, exact=True)
    return quantize_e4m3(inverse_rope(merged, positions, cos_sin).float(), 128, O8_FLOOR)
