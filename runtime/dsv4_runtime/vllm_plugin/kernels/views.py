"""Tensors of vLLM as the bundled plans take them."""

from __future__ import annotations

import torch

from dsv4_kernels.numerics import ds_mla


def pages(cache: torch.Tensor) -> torch.Tensor:
    """Return vLLM's cache [pages, tokens, 584] as uint8 [pages, bytes of a page], rows as far apart as they lie."""
    count, tokens, _ = cache.shape
    used = tokens * (ds_mla(tokens).data_row + ds_mla(tokens).scale_row)
    return cache.view(torch.uint8).as_strided((count, used), (cache.stride(0), 1))


def whole_rows(indices: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return `indices` [T, ..., W], perhaps the first columns of wider rows, as whole rows of the first `tokens`.

    vLLM narrows the rows to the longest request of a step; a plan knows rows of the full width alone.
    """
    width = indices.stride(0)
    return indices.as_strided((tokens, width), (width, 1))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, copied if it does not start at a multiple of 16 bytes (a slice of some rows)."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
