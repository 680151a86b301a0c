"""Numbers and caches as vLLM's CPU build has them for DeepSeek-V4: rotation, norm, FP8, the layout `fp8_ds_mla`.

Source: as `cpu_operators`.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOPE, ROPE, TILE = 448, 64, 64
HEAD = NOPE + ROPE
_TILES = NOPE // TILE
_TOKEN_BYTES = NOPE + 2 * ROPE
"""Of one token in an `fp8_ds_mla` block: FP8 without position, then bfloat16 with it."""
_SCALE_BYTES = _TILES + 1
"""Of one token, behind the tokens of its block: a power of two for each tile, and padding."""
INDEX_HEAD = 128
_FP8_MAX = 448.0
_LEAST = 1e-4


def rotate(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Apply the rotary embedding to neighbouring pairs (GPT-J's order).

    Args:
        x: float32 `[..., R]`.
        cos_sin: float32, broadcast to `[..., R]`: R/2 cosines, then R/2 sines.
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    sin = -sin if inverse else sin
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rms(x: Tensor, eps: float) -> Tensor:
    """Return `x` divided by the root of the mean square of its last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def fp8(x: Tensor) -> Tensor:
    """Return `x` as float8_e4m3fn; what is beyond its range becomes its greatest value."""
    return x.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


def power_of_two(x: Tensor) -> Tensor:
    """Return the scale of each row `[..., 1]` with which its greatest value still is an FP8 number."""
    return torch.exp2((x.abs().amax(-1, keepdim=True).clamp_min(_LEAST) / _FP8_MAX).log2().ceil())


def byte_places(block_size: int, slots: Tensor, begin: int, width: int) -> tuple[Tensor, Tensor]:
    """Return where `width` bytes of each slot lie in `[blocks, bytes]`, the first slot's of a block at byte `begin`."""
    return (slots // block_size)[:, None], begin + (slots % block_size)[:, None] * width + torch.arange(width)


def write_mla(cache: Tensor, block_size: int, slots: Tensor, nope: Tensor, rope: Tensor) -> None:
    """Put tokens into a cache of the layout `fp8_ds_mla`.

    Args:
        cache: uint8 `[blocks, bytes]`, changed.
        slots: int64 `[T]`, all of them valid.
        nope: bfloat16 `[T, 448]`, stored as FP8 with a power of two for every 64.
        rope: bfloat16 `[T, 64]`.
    """
    tiles = nope.float().view(-1, _TILES, TILE)
    exponent = (tiles.abs().amax(-1) / _FP8_MAX).clamp_min(_LEAST).log2().ceil()
    values = fp8(tiles * torch.exp2(-exponent)[..., None]).view(torch.uint8).flatten(1)
    scales = torch.nn.functional.pad(exponent + 127, (0, 1)).to(torch.uint8)
    cache[byte_places(block_size, slots, 0, _TOKEN_BYTES)] = torch.cat((values, rope.contiguous().view(torch.uint8)), 1)
    cache[byte_places(block_size, slots, block_size * _TOKEN_BYTES, _SCALE_BYTES)] = scales


def read_mla(cache: Tensor, block_size: int, slots: Tensor) -> Tensor:
    """Return the tokens of such a cache, as `write_mla` put them there: float32 `[T, 512]` of bfloat16's precision."""
    tokens = cache[byte_places(block_size, slots, 0, _TOKEN_BYTES)]
    scales = cache[byte_places(block_size, slots, block_size * _TOKEN_BYTES, _SCALE_BYTES)][:, :_TILES]
    tiles = tokens[:, :NOPE].contiguous().view(torch.float8_e4m3fn).float().view(-1, _TILES, TILE)
    nope = (tiles * torch.exp2(scales.float() - 127)[..., None]).flatten(1).bfloat16()
    return torch.cat((nope, tokens[:, NOPE:].contiguous().view(torch.bfloat16)), 1).float()
