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
