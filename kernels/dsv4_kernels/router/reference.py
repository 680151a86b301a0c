"""The router in torch; see the package docstring."""

from __future__ import annotations

import torch


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    scaling: float,
    k: int,
    bias: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights float32 [T, k], ids int32 [T, k]); exact: weights float64."""
    score = torch.nn.functional.softplus(x.double() @ weight.double().t()).sqrt()
    if tid2eid is not None and input_ids is not None:
        ids = tid2eid[input_ids.long()].long()
    elif bias is not None:
        ids = torch.sort(score + bias.double(), dim=1, descending=True, stable=True).indices[:, :k]
    else:
        raise ValueError("router needs bias, or tid2eid and input_ids")
    chosen = score.gather(1, ids)
    weights = chosen / chosen.sum(1, keepdim=True) * scaling
    if padding is not None:
        weights, ids = weights.masked_fill(padding[:, None], 0.0), ids.masked_fill(padding[:, None], -1)
    return weights if exact else weights.float(), ids.int()
