"""The two weight formats of the released DeepSeek-V4 checkpoints, and the way back.

Both scale by powers of two stored as UE8M0: one byte, the exponent plus 127, no sign and no mantissa.
Sources: vLLM `model_executor/layers/quantization/{fp8,mxfp4}.py`; OCP Microscaling Formats v1.0, section 6.3 (MXFP4).
"""

import torch

from dsv4_runtime.nano.recipe import FP8_BLOCK, MXFP4_BLOCK

_FP8_MAX = 448.0
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_MAX_EXPONENT = 2  # 6.0 = 1.5 * 2**2
_BIAS = 127


def _ue8m0(exponent: torch.Tensor) -> torch.Tensor:
    """Store integer exponents (any integer dtype) as `float8_e8m0fnu` of the same shape."""
    return (exponent.clamp(-_BIAS, _BIAS) + _BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def _log2(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the base-2 logarithm of positive float32 values rounded down and up, exactly, as int32."""
    mantissa, exponent = torch.frexp(value)  # mantissa from 0.5, below 1
    down = exponent - 1
    return down, torch.where(mantissa == 0.5, down, exponent)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Return `2**exponent` exactly, as float32, for int32 exponents; what would be subnormal becomes 2**-126."""
    return ((exponent.clamp(-126, 127) + _BIAS) << 23).view(torch.float32)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """View `[n, k]` as `[n/128, 128, k/128, 128]`."""
    rows, columns = weight.shape
    if rows % FP8_BLOCK or columns % FP8_BLOCK:
        raise ValueError(
            f"FP8 weight of shape [{rows}, {columns}]: both sizes must be multiples of {FP8_BLOCK}; change the recipe"
        )
    return weight.reshape(rows // FP8_BLOCK, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 `[n, k]` to e4m3 `[n, k]` and UE8M0 scales `[n/128, k/128]`.

    The scale is the smallest power of two that brings the block into the e4m3 range, so nothing saturates.

    Raises:
        ValueError: `n` or `k` is no multiple of 128.
    """
    blocks = _blocks(weight)
    peak = blocks.abs().amax(dim=(1, 3)).clamp_min(torch.finfo(torch.float32).tiny)
    _, exponent = _log2(peak / _FP8_MAX)
    scaled = blocks * _power(-exponent)[:, None, :, None]
    return scaled.to(torch.float8_e4m3fn).reshape(weight.shape), _ue8m0(exponent)


def from_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantise what `to_fp8` gave to float32 `[n, k]`."""
    blocks = _blocks(weight.to(torch.float32))
    return (blocks * scale.to(torch.float32)[:, None, :, None]).reshape(weight.shape)


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 `[n, k]` to packed E2M1 int8 `[n, k/2]` and UE8M0 scales `[n, k/32]`.

    Even `k` lies in the low nibble. The exponent follows OCP MX: that of the block's peak less that of the format's
    peak, so values above 6 after scaling saturate. Halfway values go to the smaller magnitude.

    Raises:
        ValueError: `k` is no multiple of 32.
    """
    rows, columns = weight.shape
    if columns % MXFP4_BLOCK:
        raise ValueError(
            f"MXFP4 weight of shape [{rows}, {columns}]: the second size must be a multiple of {MXFP4_BLOCK}; "
            "change the recipe"
        )
    blocks = weight.reshape(rows, columns // MXFP4_BLOCK, MXFP4_BLOCK)
    peak = blocks.abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    exponent = _log2(peak)[0] - _FP4_MAX_EXPONENT
    scaled = (blocks * _power(-exponent)[..., None]).reshape(rows, columns)
    values = torch.tensor(_FP4_VALUES, device=weight.device)
    code = torch.bucketize(scaled.abs(), (values[1:] + values[:-1]) / 2) + 8 * (scaled < 0)
    code = code.to(torch.uint8)
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    return packed.view(torch.int8), _ue8m0(exponent)


def from_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantise what `to_mxfp4` gave to float32 `[n, k]`."""
    table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    byte = packed.view(torch.uint8).to(torch.int64)
    values = torch.stack((table[byte & 0xF], table[byte >> 4]), dim=-1).reshape(packed.shape[0], -1)
    return values * scale.to(torch.float32).repeat_interleave(MXFP4_BLOCK, dim=1)
