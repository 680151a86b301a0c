"""Selection of kernels, and their speed relative to vLLM's."""

from __future__ import annotations

import pytest

from dsv4_runtime.contract.kernels import (
    ALL_BUNDLED,
    BUNDLED,
    BUNDLED_W4A8,
    STOCK,
    KernelChoice,
    KernelChoiceError,
    KernelStatus,
    Op,
    ProviderStatus,
    needs_evidence,
    parse_kernel_choice,
)

SOME = KernelChoice({Op.MOE: BUNDLED})


@pytest.mark.parametrize("text", ["auto", " auto "])
def test_auto_follows_the_evidence(text: str | None) -> None:
    assert parse_kernel_choice(text, SOME) == SOME
    assert needs_evidence(text)


@pytest.mark.parametrize("text", [None, "", " ", "off"])
def test_off_leaves_every_operation_to_vllm_and_is_the_default(text: str | None) -> None:
    assert not any(parse_kernel_choice(text, ALL_BUNDLED).bundled(op) for op in Op)
    assert not needs_evidence(text)


def test_a_named_operation_is_pinned_and_the_others_follow_the_evidence() -> None:
    found = parse_kernel_choice("moe=bundled_w4a8, mla_decode=stock", SOME)
    assert (found.provider(Op.MOE), found.provider(Op.MLA_DECODE)) == (BUNDLED_W4A8, STOCK)
    assert found.provider(Op.FP8_LINEAR) == STOCK
    assert needs_evidence("moe=bundled_w4a8, mla_decode=stock")


def test_nothing_is_tried_when_every_operation_is_named() -> None:
    text = str(ALL_BUNDLED)
    assert not needs_evidence(text)
    assert parse_kernel_choice(text) == ALL_BUNDLED


@pytest.mark.parametrize(
    ("text", "named"),
    [("moe", "'moe'"), ("gemm=bundled", "'gemm=bundled'"), ("moe=marlin", "'marlin'"), ("on", "'on'")],
)
def test_unknown_choices_are_refused_with_the_available_ones(text: str, named: str) -> None:
    with pytest.raises(KernelChoiceError) as error:
        parse_kernel_choice(text)
    assert named in str(error.value)
    assert "bundled" in str(error.value) or "moe" in str(error.value)


STANDINGS = tuple(
    ProviderStatus(provider=name, slowness=slowness, excluded=None if slowness else "t1: wrong")
    for name, slowness in {"bundled": 1.1, "bundled_w4a8": 1.0, "marlin": 1.32, "triton": 1.65, "cutlass": None}.items()
)


@pytest.mark.parametrize(
    ("provider", "compared"),
    [("bundled", ("marlin", 1.2)), ("bundled_w4a8", ("marlin", 1.32)), ("stock", ("bundled_w4a8", 1 / 1.32))],
)
def test_speed_is_against_the_fastest_of_the_other_side(provider: str, compared: tuple[str, float]) -> None:
    found = KernelStatus(op="moe", provider=provider, standings=STANDINGS).against_next()
    assert found is not None
    assert found == (compared[0], pytest.approx(compared[1]))


def test_providers_that_vllm_uses_only_on_request_are_not_its_default() -> None:
    more = (*STANDINGS, ProviderStatus(provider="b12x", slowness=1.0))
    stock = KernelStatus(op="moe", provider="stock", standings=more).against_next()
    assert stock == ("bundled_w4a8", pytest.approx(1 / 1.32))
    bundled = KernelStatus(op="moe", provider="bundled", standings=more).against_next()
    assert bundled == ("b12x", pytest.approx(1 / 1.1))


@pytest.mark.parametrize("standings", [(), STANDINGS[:2], STANDINGS[2:]])
def test_no_speed_without_another_side(standings: tuple[ProviderStatus, ...]) -> None:
    assert KernelStatus(op="moe", provider="bundled", standings=standings).against_next() is None
