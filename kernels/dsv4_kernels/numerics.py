"""Number formats in torch and layouts of the packed caches.

UE8M0 scales, E4M3 and E2M1 codes and the quantisers of DeepSeek-V4; the kernels must equal these bitwise. Layouts are
data that references, plans and tests share.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

E4M3_MAX = 448.0
# The eight magnitudes of E2M1 (OCP MX 1.0, table 5.3.3); bit 3 of a code is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def seeded(device: torch.device, seed: int) -> torch.Generator:
    """Return a seeded source of random values on `device`, since many take seconds on a CPU.

    Tensors on "meta" have no values, and draw them from a CPU's.
    """
    return torch.Generator(device="cpu" if device.type == "meta" else device).manual_seed(seed)


def ue8m0_decode(code: torch.Tensor) -> torch.Tensor:
    """uint8 codes → float64 2^(code − 127); 255 is NaN (OCP MX 1.0)."""
    value = torch.exp2(code.to(torch.float64) - 127.0)
    return torch.where(code == 255, torch.full_like(value, torch.nan), value)


def ue8m0_ceil(x: torch.Tensor) -> torch.Tensor:
    """float32 x > 0 → uint8 code of the least power of two ≥ x, by exponent and mantissa bits (no logarithm, so no
    rounding of one).
    """
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    code = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return code.clamp(0, 254).to(torch.uint8)


def e4m3_encode(x: torch.Tensor) -> torch.Tensor:
    """Round to nearest even E4M3 with saturation; returns uint8 codes."""
    return x.to(torch.float32).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(code: torch.Tensor) -> torch.Tensor:
    """uint8 codes → float64."""
    return code.view(torch.float8_e4m3fn).to(torch.float64)


def quantize_e4m3(x: torch.Tensor, group: int, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dimension in groups with one power-of-two scale each.

    x [..., N] with N a multiple of `group`; the scale is the least power of two ≥ max(amax, floor)/448.
    Returns (codes uint8 [..., N], scales uint8 [..., N/group]).
    """
    parts = x.to(torch.float32).unflatten(-1, (-1, group))
    amax = parts.abs().amax(-1).clamp_min(floor)
    scale = ue8m0_ceil(amax / E4M3_MAX)
    inverse = torch.exp2(127.0 - scale.to(torch.float32))
    return e4m3_encode(parts * inverse.unsqueeze(-1)).flatten(-2), scale


def dequantize_e4m3(code: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """Inverse of `quantize_e4m3`, as float64: code uint8 [..., N], scale uint8 [..., N/group]."""
    return (e4m3_decode(code).unflatten(-1, (-1, group)) * ue8m0_decode(scale).unsqueeze(-1)).flatten(-2)


def dequantize_blocks(code: torch.Tensor, scale: torch.Tensor, block: int = 128) -> torch.Tensor:
    """Weights uint8 [..., N, K] with uint8 scales [..., ⌈N/block⌉, ⌈K/block⌉] → float64 [..., N, K]."""
    n, k = code.shape[-2:]
    wide = ue8m0_decode(scale).repeat_interleave(block, -2)[..., :n, :].repeat_interleave(block, -1)[..., :k]
    return e4m3_decode(code) * wide


def e2m1_decode(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2], low nibble first → float64 [..., K]."""
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64, device=packed.device)
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return table[nibbles.long()]


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor, group: int = 32) -> torch.Tensor:
    """MXFP4 weights: packed uint8 [..., K/2], scale uint8 [..., K/group] → float64 [..., K]."""
    return (e2m1_decode(packed).unflatten(-1, (-1, group)) * ue8m0_decode(scale).unsqueeze(-1)).flatten(-2)


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Turn the last 64 of x [T, ..., N], as interleaved pairs, by the angles of positions [T], or back; float64.

    cos_sin: float32 [positions, 64], 32 cosines and 32 sines.
    """
    cos, sin = cos_sin[positions].double().view(x.shape[0], *[1] * (x.dim() - 2), 64).split(32, -1)
    sin = -sin if back else sin
    even, odd = x[..., -64::2].double(), x[..., -63::2].double()
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :-64].double(), turned), -1)


def as_numbers(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """(code [..., N], scale [..., N/128]) → (float64 [..., N],): quantised results as the numbers that they stand
    for.
    """
    code, scale = outputs
    return (dequantize_e4m3(code, scale, 128),)


LARGEST_SCALE = 134
"""The largest UE8M0 byte (2^7) of a group that mla_decode dequantises exactly, for values up to 57,344."""


@dataclass(frozen=True)
class PackedCache:
    """A page of `tokens` tokens: first every token's data row, then every token's scale row, then padding.

    `nope` E4M3 codes and `rope` bf16 values make a data row, one UE8M0 byte per `group` codes plus `scale_padding` zero
    bytes a scale row. The length of a page is rounded up to a multiple of `align`. A page may sit in a larger block:
    addresses take the stride between pages from the tensor, not from here.
    """

    tokens: int
    nope: int = 448
    rope: int = 64
    group: int = 64
    scale_padding: int = 1
    align: int = 576

    @property
    def width(self) -> int:
        """Values of one token."""
        return self.nope + self.rope

    @property
    def data_row(self) -> int:
        """Bytes of one token's data."""
        return self.nope + 2 * self.rope

    @property
    def groups(self) -> int:
        """Scale bytes in use per token."""
        return self.nope // self.group

    @property
    def scale_row(self) -> int:
        """Bytes of one token's scales."""
        return self.groups + self.scale_padding

    @property
    def page_bytes(self) -> int:
        """Bytes of one page with its padding."""
        used = self.tokens * (self.data_row + self.scale_row)
        return -(-used // self.align) * self.align


@functools.cache
def ds_mla(tokens: int) -> PackedCache:
    """DeepSeek-V4's `fp8_ds_mla` page of `tokens` tokens (584 bytes each); 64 for the window and ratio 4, 2 for ratio
    128.
    """
    return PackedCache(tokens)
