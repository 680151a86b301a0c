"""Selection in torch; see the package docstring."""

from __future__ import annotations

import torch


def topk(
    logits: torch.Tensor, lengths: torch.Tensor, k: int, out: torch.Tensor | None = None, exact: bool = False
) -> torch.Tensor:
    """logits float32 [R, ·], lengths int32 of R values → int32 [R, k]; `exact` changes nothing."""
    rows = logits.shape[0]
    result = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    for row, length in enumerate(lengths.flatten().tolist()):
        if length <= k:
            result[row, :length] = torch.arange(length, device=logits.device)
            continue
        bits = logits[row, :length].contiguous().view(torch.int32)
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        best = torch.sort(ordered, descending=True, stable=True).indices[:k]
        result[row] = best.sort().values
    return result if out is None else out[:, :k].copy_(result)
