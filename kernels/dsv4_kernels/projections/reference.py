"""The projections in torch; see the package docstring."""

from __future__ import annotations

import torch


def projections(
    x: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    ape: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    index_weight: torch.Tensor | None = None,
    index_ape: torch.Tensor | None = None,
    index_state_cache: torch.Tensor | None = None,
    index_slot_mapping: torch.Tensor | None = None,
    head_weight: torch.Tensor | None = None,
    exact: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Write into the state caches; return (state_cache,) or (state_cache, index_state_cache, heads)."""

    def saved(
        weight: torch.Tensor, ape: torch.Tensor, state_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        kept = (slot_mapping >= 0).nonzero()[:, 0]
        slots, block = slot_mapping[kept], state_cache.shape[1]
        kv, score = (x[kept].double() @ weight.double().t()).chunk(2, 1)
        rows = torch.cat((kv, score + ape.double()[positions[kept] % ape.shape[0]]), 1)
        cache = state_cache.double()
        cache[slots // block, slots % block] = rows
        state_cache.copy_(cache)
        return cache if exact else state_cache

    state = saved(weight, ape, state_cache, slot_mapping)
    if (
        index_weight is None
        or index_ape is None
        or index_state_cache is None
        or index_slot_mapping is None
        or head_weight is None
    ):
        return (state,)
    heads = x.double() @ head_weight.double().t()
    index_state = saved(index_weight, index_ape, index_state_cache, index_slot_mapping)
    return state, index_state, heads if exact else heads.bfloat16()
