"""FP8 codes that go along with the tensor that they stand for, from the kernel that makes both to the products.

vLLM hands a layer's input to its linear layers as the object that it got, through custom operators and onto side
streams too, so an attribute of it gets there. Of a tensor that vLLM makes of it (gathered, padded, a weak reference of
a graph) the attribute is gone, and the product quantises as it would without. Codes live as long as their tensor's
values: both are overwritten by the plan's next run.
"""

from __future__ import annotations

import torch

Codes = tuple[torch.Tensor, torch.Tensor]
"""code uint8 [T, K] (E4M3) and scale uint8 [T, K/128] (UE8M0), as `dsv4_kernels.fp8` makes them."""
_ATTRIBUTE = "dsv4_fp8"
_WANTED: dict[int, int] = {}


def want(k: int, tokens: int) -> None:
    """Note that a product takes codes of up to `tokens` rows of `k` values."""
    _WANTED[k] = max(tokens, wanted(k))


def wanted(k: int) -> int:
    """Return of how many rows of `k` values at most some product takes codes; 0 if none does."""
    return _WANTED.get(k, 0)


def give(x: torch.Tensor, codes: Codes | None) -> torch.Tensor:
    """Return `x` [T, K], whose values must not change any more, with its `codes`."""
    if codes is not None:
        setattr(x, _ATTRIBUTE, codes)
    return x


def given(x: torch.Tensor) -> Codes | None:
    """Return the codes that came with `x`, if any did."""
    return getattr(x, _ATTRIBUTE, None)
