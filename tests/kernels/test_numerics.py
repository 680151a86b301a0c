"""Number formats: every code, and the rounding at every boundary."""

from __future__ import annotations

import torch

from dsv4_kernels import numerics


def test_ue8m0_rounds_up_to_a_power_of_two() -> None:
    for power in range(-120, 120):
        x = torch.tensor([2.0**power], dtype=torch.float32)
        above = torch.nextafter(x, torch.tensor(torch.inf))
        assert numerics.ue8m0_ceil(x).item() == power + 127
        assert numerics.ue8m0_ceil(above).item() == power + 128
    assert torch.isnan(numerics.ue8m0_decode(torch.tensor([255], dtype=torch.uint8))).all()


def test_e2m1_takes_the_low_nibble_first() -> None:
    packed = torch.tensor([[0x21, 0xF7]], dtype=torch.uint8)
    assert numerics.e2m1_decode(packed).tolist() == [[0.5, 1.0, 6.0, -6.0]]


def test_quantising_never_saturates_and_uses_the_range() -> None:
    x = torch.randn((64, 512), generator=torch.Generator().manual_seed(1)) * 1000
    code, scale = numerics.quantize_e4m3(x, 128, 1e-4)
    back = numerics.dequantize_e4m3(code, scale, 128)
    assert float((back - x).abs().max() / x.abs().max()) < 2**-4
    amax = x.unflatten(-1, (-1, 128)).abs().amax(-1).double()
    peak = amax / numerics.ue8m0_decode(scale)
    assert bool((peak <= 448).all())
    assert bool((peak > 224).all())


def test_block_scales_reach_exactly_their_block() -> None:
    code = torch.full((130, 256), 0x38, dtype=torch.uint8)  # 1.0
    scale = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    out = numerics.dequantize_blocks(code, scale)
    assert out[0, 0] == 1
    assert out[127, 128] == 2
    assert out[128, 127] == 4
    assert out[129, 255] == 8
