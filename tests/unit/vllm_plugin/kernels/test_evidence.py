"""From what was seen of the providers to the choice."""

from __future__ import annotations

import pytest

from dsv4_kernels.registry import operation
from dsv4_runtime.contract.kernels import BUNDLED, BUNDLED_W4A8, STOCK, Op
from dsv4_runtime.nano.recipe import Precision, model_config, recipe_for
from dsv4_runtime.vllm_plugin.kernels.evidence import SIZES, Seen, Trial, choose, standings, trials

TRIED = (Trial(Op.MOE, "t1", "moe_w4a16", {}), Trial(Op.MOE, "t8", "moe_w4a16", {}))


def seen(provider: str, *times: float | str) -> list[Seen]:
    """What a provider did with `TRIED`: its microseconds, or the fault that was seen."""
    return [
        Seen(Op.MOE, trial.name, provider, **({"fault": t} if isinstance(t, str) else {"microseconds": t}))
        for trial, t in zip(TRIED, times, strict=False)
    ]


def chosen(*found: list[Seen], eight: bool = False) -> str:
    standing = standings([one for many in found for one in many], TRIED)
    return choose(standing, eight_bit_activations=eight).provider(Op.MOE)


def test_the_fastest_right_provider_is_taken() -> None:
    assert chosen(seen(BUNDLED, 10.0, 20.0), seen("marlin", 15.0, 21.0)) == BUNDLED
    assert chosen(seen(BUNDLED, 16.0, 22.0), seen("marlin", 15.0, 21.0)) == STOCK


def test_each_trial_weighs_the_same_however_long_it_takes() -> None:
    assert chosen(seen(BUNDLED, 10.0, 1100.0), seen("marlin", 20.0, 1000.0)) == BUNDLED


@pytest.mark.parametrize("fault", ["wrong: rms above 5e-3", "its process was ended by SIGSEGV", "not done after 20 s"])
def test_a_provider_with_one_fault_is_excluded_by_name(fault: str) -> None:
    found = [*seen(BUNDLED, 10.0, fault), *seen("marlin", 15.0, 21.0)]
    by = {s.provider: s for s in standings(found, TRIED)}
    assert by[BUNDLED].slowness is None
    assert by[BUNDLED].excluded == f"t8: {fault}"
    assert by["marlin"].slowness == pytest.approx(1.0)
    assert choose(standings(found, TRIED), eight_bit_activations=False).provider(Op.MOE) == STOCK


def test_a_provider_without_a_result_or_a_time_is_excluded() -> None:
    by = {s.provider: s.excluded for s in standings([*seen(BUNDLED, 1.0), Seen(Op.MOE, "t1", "marlin")], TRIED)}
    assert by == {BUNDLED: "t8: no result", "marlin": "t1: not timed"}


def test_vllm_keeps_the_operation_when_nobody_is_right() -> None:
    assert chosen(seen(BUNDLED, "wrong: x", "wrong: x"), seen("marlin", "not done after 20 s", "y")) == STOCK


def test_rounded_activations_are_taken_only_where_vllm_rounds_them_too() -> None:
    both = (seen(BUNDLED, 10.0, 20.0), seen(BUNDLED_W4A8, 5.0, 10.0))
    assert chosen(*both) == BUNDLED
    assert chosen(*both, eight=True) == BUNDLED_W4A8


def test_what_vllm_would_not_pick_itself_is_compared_and_not_chosen() -> None:
    found = standings([*seen(BUNDLED, 10.0, 20.0), *seen("marlin", 15.0, 21.0), *seen("b12x", 5.0, 10.0)], TRIED)
    assert {s.provider: s.slowness for s in found} == pytest.approx(
        {BUNDLED: 2.0, "marlin": 2.5, "b12x": 1.0}, rel=0.03
    )
    assert choose(found, eight_bit_activations=True).provider(Op.MOE) == BUNDLED


def test_a_rough_providers_time_stands_beside_why_it_is_excluded() -> None:
    rough = [Seen(Op.MOE, t.name, "flashinfer", fault="wrong: diff", microseconds=8.0) for t in TRIED]
    by = {s.provider: s for s in standings([*seen(BUNDLED, 10.0, 10.0), *rough], TRIED)}
    assert by["flashinfer"].slowness is None
    assert by["flashinfer"].excluded == "t1: 0.80 of the fastest right one's time, but wrong: diff"
    assert by[BUNDLED].slowness == pytest.approx(1.0)
    alone = standings(rough, TRIED)
    assert [s.excluded for s in alone] == ["t1: wrong: diff"]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_trial_is_a_shape_that_its_operation_supports(tensor_parallel: int) -> None:
    from dsv4_kernels.arch import Arch

    config = model_config(recipe_for(Precision.FP8))
    assert set(SIZES) <= config.keys()
    tried = trials(config, tensor_parallel)
    assert {trial.op for trial in tried} == set(Op)
    for trial in tried:
        row = operation(trial.operation)
        assert row.is_supported(trial.params, Arch.SM_120).reason is None
        assert row.nbytes(trial.params) > 0
    width = {trial.params["inter"] for trial in tried if trial.op is Op.MOE}
    assert width == {config["moe_intermediate_size"] // tensor_parallel}
