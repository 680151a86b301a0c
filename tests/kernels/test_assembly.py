"""The kernels' inline assembly, emulated for every code and scale: the interpreter uses other code."""

from __future__ import annotations

import pytest
import torch

from dsv4_kernels.numerics import LARGEST_SCALE, e4m3_decode
from dsv4_testkit import ptx

ASSEMBLIES = ptx.assemblies()
DEQUANTIZE = ("mla_decode/kernel.py", "_dequantize")
WIDEN_BF16 = ("moe/kernel.py", "widen_bf16")
WIDEN_E4M3 = ("moe/columns.py", "widen_e4m3")
COPY = ("mhc/kernel.py", "_combine")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat((E2M1, -E2M1))
"""The values of the sixteen codes of E2M1; the sign of −0 is not compared."""


def words(*bytes_: torch.Tensor) -> torch.Tensor:
    """Return four bytes as words; the first byte is the lowest."""
    return sum((one.long() << (8 * place) for place, one in enumerate(bytes_)), torch.tensor(0))


def same(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether bf16 `found` has the bits of float64 `want` rounded."""
    return torch.equal(found.view(torch.int16), want.float().to(torch.bfloat16).view(torch.int16))


def test_all_assembly_is_emulated_here() -> None:
    assert {where: len(texts) for where, texts in ASSEMBLIES.items()} == {
        DEQUANTIZE: 1,
        WIDEN_BF16: 2,
        WIDEN_E4M3: 1,
        COPY: 1,
    }


def test_rows_of_the_cache_are_widened_exactly() -> None:
    """All codes, with all scales of the contract; in each of the four places of a word."""
    code, byte = torch.meshgrid(torch.arange(256), torch.arange(LARGEST_SCALE + 1), indexing="ij")
    code, byte = code.flatten(), byte.flatten()
    numbers = (code & 0x7F) != 0x7F
    code, byte = code[numbers], byte[numbers]
    want = e4m3_decode(code.to(torch.uint8)) * 2.0 ** (byte.double() - 127)
    # Same computation of a scale's factor as in the kernel.
    factor = ((byte + 120) << 7).to(torch.int16).view(torch.bfloat16)
    other = torch.zeros_like(code)
    for place in range(4):
        packed = words(*(code if at == place else other for at in range(4)))
        out = ptx.run(ASSEMBLIES[DEQUANTIZE][0], {2: packed, 3: ptx.pair(factor, factor), 4: ptx.pair(factor, factor)})
        assert same(ptx.bf16(out[place // 2], place % 2), want)


def test_a_larger_scale_would_overflow() -> None:
    """Reason for the limit of the contract."""
    one, byte = torch.tensor([0x38]), LARGEST_SCALE + 1
    factor = torch.tensor([(byte + 120) << 7]).to(torch.int16).view(torch.bfloat16)
    out = ptx.run(ASSEMBLIES[DEQUANTIZE][0], {2: one, 3: ptx.pair(factor, factor), 4: ptx.pair(factor, factor)})
    assert torch.isinf(ptx.bf16(out[0], 0)).all()


def test_mxfp4_is_widened_to_bf16_exactly() -> None:
    """All pairs of codes with all scales of the experts' contract; the factors by the first assembly."""
    byte, scale = (one.flatten() for one in torch.meshgrid(torch.arange(256), torch.arange(64, 191), indexing="ij"))
    make_factor, widen = ASSEMBLIES[WIDEN_BF16]
    factors = ptx.run(make_factor, {2: words(scale, scale, scale, scale)})
    exact = 2.0 ** (scale.double() - 127 - 63)
    for word in factors.values():
        for half in (0, 1):
            assert same(ptx.bf16(word, half), exact * 2.0**126)
    other = torch.full_like(byte, 0x5A)
    for place in range(4):
        packed = words(*(byte if at == place else other for at in range(4)))
        out = ptx.run(widen, {4: packed, 5: factors[0], 6: factors[1]})
        even, odd = (ptx.bf16(out[place // 2 + offset], place % 2).double() for offset in (0, 2))
        assert torch.equal(even, E2M1[byte & 15] * exact)
        assert torch.equal(odd, E2M1[byte >> 4] * exact)


def test_mxfp4_is_widened_to_e4m3_exactly() -> None:
    byte = torch.arange(256)
    for place in range(4):
        packed = words(*(byte if at == place else 255 - byte for at in range(4)))
        out = ptx.run(ASSEMBLIES[WIDEN_E4M3][0], {2: packed})
        for number, nibble in ((0, byte & 15), (1, byte >> 4)):
            found = (out[number] >> (8 * place) & 255).to(torch.uint8)
            assert torch.equal(e4m3_decode(found), E2M1[nibble] * 2.0**-6)


@pytest.mark.parametrize("value", [0, 1, 0x80008000, 0xFFFFFFFF])
def test_a_pinned_value_is_itself(value: int) -> None:
    assert ptx.run(ASSEMBLIES[COPY][0], {1: torch.tensor([value])})[0].tolist() == [value]
