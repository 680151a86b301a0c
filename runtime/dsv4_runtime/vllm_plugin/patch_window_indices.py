"""Computes the sliding-window indices on the CPU in torch instead of in Triton's interpreter."""

from typing import Any

import torch

from dsv4_runtime.vllm_plugin.patch import Patch, PatchOutcome, expect_parameters

_MODULE = "vllm.v1.attention.backends.mla.sparse_swa"
_SYMBOL = "ComputeSWAIndicesAndLensKernel.__call__"
_PARAMETERS = [
    "self",
    "swa_indices",
    "swa_lens",
    "window_size",
    "index_width",
    "left_visible",
    "right_visible",
    "query_start_loc",
    "seq_lens",
    "token_to_req_indices",
    "is_valid_token",
    "block_table",
    "block_size",
    "replay_start",
    "num_tokens",
    "token_offset",
    "has_image",
]


def window_indices(
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    window_size: int,
    index_width: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    replay_start: torch.Tensor,
    *,
    num_tokens: int,
    token_offset: int,
) -> None:
    """Write, for each token, the cache slots of the positions in its window, oldest first, and their number.

    The same numbers as vLLM's kernel `_compute_swa_indices_and_lens_kernel` without images.

    Args:
        swa_indices: output, int32 `[>= num_tokens, (1,) >= index_width]`; -1 fills a row's end.
        swa_lens: output, int32 `[>= num_tokens]`.
        window_size: positions that a token sees, itself included.
        index_width: columns written.
        query_start_loc: int32 `[requests + 1]`, first token of each request in the batch.
        seq_lens: int32 `[requests]`, each request's length after this step, in tokens.
        token_to_req_indices: int32 `[tokens]`.
        is_valid_token: bool `[tokens]`; a padding token gets length 0 and a row of -1.
        block_table: int32 `[requests, blocks]`.
        block_size: tokens per cache block.
        replay_start: `[requests]`, position from which a request holds window entries.
        num_tokens: rows written.
        token_offset: the first row's token in the batch.
    """
    tokens = torch.arange(token_offset, token_offset + num_tokens)
    request = token_to_req_indices[tokens].long()
    start = query_start_loc[request].long()
    position = seq_lens[request].long() - (query_start_loc[request + 1].long() - start) + tokens - start
    first = torch.maximum((position - (window_size - 1)).clamp_min(0), replay_start[request].long())
    valid = is_valid_token[tokens]
    length = torch.where(valid, position + 1 - first, 0)
    column = torch.arange(index_width)
    inside = column < length[:, None]
    wanted = torch.where(inside, first[:, None] + column, 0)
    block = block_table[request[:, None], wanted // block_size].long()
    slots = torch.where(inside, block * block_size + wanted % block_size, -1)
    swa_lens[:num_tokens] = length.to(swa_lens.dtype)
    rows = swa_indices[:num_tokens]
    rows.view(num_tokens, -1)[:, :index_width] = slots.to(swa_indices.dtype)


def _apply() -> PatchOutcome:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import sparse_swa

    if not current_platform.is_cpu():
        return PatchOutcome.NOT_WANTED
    kernel: Any = getattr(sparse_swa, "ComputeSWAIndicesAndLensKernel", None)
    expect_parameters(_SYMBOL, kernel and kernel.__call__, _PARAMETERS)
    original = kernel.__call__

    def call(self: Any, *args: Any, has_image: bool = False, **kwargs: Any) -> Any:
        if has_image:  # a vision model's; no such model runs here
            return original(self, *args, has_image=has_image, **kwargs)
        # Positions 4 and 5 are the images' visibility.
        return window_indices(*args[:4], *args[6:], **kwargs)

    kernel.__call__ = call
    return PatchOutcome.APPLIED


PATCH = Patch(
    module=_MODULE,
    symbol=_SYMBOL,
    why=(
        "interpreted on a CPU the kernel takes 6 ms per prompt token,"
        " and vLLM's CPU attention does not even read the result"
    ),
    upstream="none: vLLM means Triton's CPU compiler to be there",
    versions="vLLM 0.32.0",
    obsolete_when="vLLM's CPU metadata builder no longer launches the kernel",
    apply=_apply,
)
