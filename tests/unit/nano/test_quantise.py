import pytest
import torch

from dsv4_kernels.numerics import dequantize_blocks, dequantize_mxfp4
from dsv4_runtime.nano.weights import to_fp8, to_mxfp4


def draw(*shape: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    scales = torch.exp(spread * torch.randn(shape[0], 1, generator=generator))
    return torch.randn(*shape, generator=generator) * scales


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


def test_fp8_comes_back_within_its_three_mantissa_bits():
    weight = draw(256, 384)
    stored, scale = to_fp8(weight)
    assert (stored.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert (stored.shape, scale.shape) == ((256, 384), (2, 3))
    assert relative(dequantize_blocks(stored.view(torch.uint8), scale.view(torch.uint8)), weight) < 0.04


def test_fp8_uses_the_smallest_scale_that_does_not_saturate():
    weight = draw(256, 384)
    stored, _ = to_fp8(weight)
    peaks = stored.float().abs().reshape(2, 128, 3, 128).amax(dim=(1, 3))
    assert (peaks <= 448).all()
    assert (peaks > 448 / 2 * 0.96).all()  # half the scale would have saturated, apart from rounding


@pytest.mark.parametrize(("peak", "byte"), [(448.0, 127), (449.0, 128), (224.0, 126), (0.0, 0)])
def test_fp8_scale_byte(peak: float, byte: int):
    weight = torch.zeros(128, 128)
    weight[3, 5] = peak
    stored, scale = to_fp8(weight)
    assert scale.view(torch.uint8).item() == byte
    assert dequantize_blocks(stored.view(torch.uint8), scale.view(torch.uint8))[3, 5].item() == pytest.approx(
        peak, rel=0.07
    )


def test_fp8_refuses_ragged_blocks():
    with pytest.raises(ValueError, match=r"\[128, 130\].*multiples of 128"):
        to_fp8(torch.zeros(128, 130))


def test_mxfp4_comes_back_within_its_one_mantissa_bit():
    weight = draw(64, 256)
    packed, scale = to_mxfp4(weight)
    assert (packed.dtype, scale.dtype) == (torch.int8, torch.float8_e8m0fnu)
    assert (packed.shape, scale.shape) == ((64, 128), (64, 8))
    assert relative(dequantize_mxfp4(packed.view(torch.uint8), scale.view(torch.uint8)), weight) < 0.15


def test_mxfp4_is_exact_on_its_own_values_low_nibble_first():
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 0.0])
    weight = values.repeat(2).reshape(1, 32) * 2.0**-3
    packed, scale = to_mxfp4(weight)
    assert scale.view(torch.uint8).tolist() == [[127 - 3]]
    assert packed.view(torch.uint8)[0, :4].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(dequantize_mxfp4(packed.view(torch.uint8), scale.view(torch.uint8)).float(), weight)


def test_mxfp4_rounds_to_the_nearest_value_and_halfway_values_down():
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    halfway = (values[1:] + values[:-1]) / 2
    more, less = torch.nextafter(halfway, values[1:]), torch.nextafter(halfway, values[:-1])
    # Each block has the peak 6, so its scale is 1; 7.9 is beyond the largest value.
    weight = torch.zeros(2, 32)
    weight[0] = torch.cat((halfway, more, less, values, torch.tensor([1e-45, 0.8, 7.9])))
    weight[1] = -weight[0]
    packed, _ = to_mxfp4(weight)
    code = torch.stack((packed & 15, (packed.view(torch.uint8) >> 4).view(torch.int8)), -1).flatten(1)
    magnitude = [*range(7), *range(1, 8), *range(7), *range(8), 0, 2, 7]
    assert code[0].tolist() == magnitude
    assert code[1].tolist() == [8 + each if weight[0, at] else 0 for at, each in enumerate(magnitude)]


def test_mxfp4_refuses_ragged_blocks():
    with pytest.raises(ValueError, match=r"\[4, 48\].*multiple of 32"):
        to_mxfp4(torch.zeros(4, 48))
