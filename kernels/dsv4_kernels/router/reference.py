"""The router in torch; see the package docstring."""

from __future__ import annotations

import torch

SMALLEST = 2.0**-149
"""The smallest float32: a softplus below it is 0."""


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
    """Return (weights float32 [T, k], ids int32 [T, k]); exact: weights float64, of scores that underflow as float32
    does.
    """
    soft = torch.nn.functional.softplus(x.double() @ weight.double().t())
    score = soft.masked_fill(soft < SMALLEST, 0.0).sqrt()
    if tid2eid is not None and input_ids is not None:
        ids = tid2eid[input_ids.long()].long()
    elif bias is not None:
        ids = torch.sort(score + bias.double(), dim=1, descending=True, stable=True).indices[:, :k]
    else:
        raise ValueError("router needs bias, or tid2eid and input_ids")
    chosen = score.gather(1, ids)
    total = chosen.sum(1, keepdim=True)
    weights = chosen / torch.where(total > 0.0, total, 1.0) * scaling
    if padding is not None:
        weights, ids = weights.masked_fill(padding[:, None], 0.0), ids.masked_fill(padding[:, None], -1)
    return weights if exact else weights.float(), ids.int()
