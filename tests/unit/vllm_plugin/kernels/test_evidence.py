"""From observations of the providers to the choice."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_kernels.arch import Arch
from dsv4_kernels.registry import operation
from dsv4_runtime.contract.kernels import BUNDLED, BUNDLED_W4A8, STOCK, Op
from dsv4_runtime.nano.recipe import Precision, model_config, recipe_for
from dsv4_runtime.vllm_plugin.kernels.evidence import (
    PREFILL,
    SIZES,
    STARTS,
    Kept,
    Seen,
    Trial,
    choose,
    standings,
    trials,
)

TRIED = (Trial(Op.MOE, "t1", "moe_w4a16", {}), Trial(Op.MOE, "t8", "moe_w4a16", {}))


def seen(provider: str, *times: float | str) -> list[Seen]:
    """Return a provider's results of `TRIED`: its microseconds, or the observed fault."""
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


def test_vllm_keeps_the_operation_without_a_correct_provider() -> None:
    assert chosen(seen(BUNDLED, "wrong: x", "wrong: x"), seen("marlin", "not done after 20 s", "y")) == STOCK


def test_rounded_activations_are_taken_only_where_vllm_rounds_them_too() -> None:
    both = (seen(BUNDLED, 10.0, 20.0), seen(BUNDLED_W4A8, 5.0, 10.0))
    assert chosen(*both) == BUNDLED
    assert chosen(*both, eight=True) == BUNDLED_W4A8


def test_providers_that_vllm_uses_only_on_request_are_compared_and_not_chosen() -> None:
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


FLASH = {
    "hidden_size": 4096, "q_lora_rank": 1024, "head_dim": 512, "num_attention_heads": 64, "o_groups": 8,
    "o_lora_rank": 1024, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 6,
    "sliding_window": 128, "index_topk": 512, "index_n_heads": 64,
}  # fmt: skip


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("data_parallel", [1, 2])
@pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
def test_every_trial_of_flash_is_a_shape_that_its_operation_supports(
    tensor_parallel: int, data_parallel: int, expert_parallel: bool
) -> None:
    tried = trials(
        FLASH, tensor_parallel, data_parallel=data_parallel, expert_parallel=expert_parallel, large_products=True
    )
    assert len({(one.op, one.name) for one in tried}) == len(tried), "names tell the trials of an operation apart"
    for trial in tried:
        assert operation(trial.operation).is_supported(trial.params, Arch.SM_90).reason is None, trial


@pytest.mark.parametrize(("options", "inter", "experts"), [
    ({}, 256, 256), ({"expert_parallel": True}, 2048, 32), ({"data_parallel": 2}, 128, 256),
    ({"data_parallel": 2, "expert_parallel": True}, 2048, 16),
    ({"expert_parallel": True, "redundant_experts": 16}, 2048, 34),
])  # fmt: skip
def test_experts_are_tried_as_vllm_spreads_them(options: dict[str, Any], inter: int, experts: int) -> None:
    """Eight tensor parallel ranks: a share of every expert, or whole experts, with most tokens on other ranks."""
    moe = [trial.params for trial in trials(FLASH, 8, **options) if trial.op is Op.MOE]
    assert {(one["inter"], one["experts"]) for one in moe} == {(inter, experts)}
    spread = 8 * options.get("data_parallel", 1)
    assert {(one.get("routing"), one.get("ranks")) for one in moe} == {
        ("holes", spread) if options.get("expert_parallel") else (None, None)
    }


def test_one_rank_has_all_experts_with_expert_parallelism_too() -> None:
    """vLLM then distributes no experts either."""
    assert trials(FLASH, 1, expert_parallel=True) == trials(FLASH, 1)


def test_expert_parallel_ids_are_mostly_of_other_ranks() -> None:
    row = operation("moe_w4a16")
    params = {"tokens": 200, "hidden": 128, "inter": 32, "experts": 8, "topk": 4, "routing": "holes", "ranks": 8}
    ids = row.make_inputs(params, torch.device("cpu"), 0)["topk_ids"]
    assert 0.02 < float((ids >= 0).float().mean()) < 0.25


def test_operations_of_prompts_are_tried_on_a_piece_of_a_prompt() -> None:
    """FP8 products of prompts are only tried if they are bundled."""

    def most(op: Op, **options: Any) -> int:
        sizes = [t.params.get("tokens", t.params.get("rows", 0)) for t in trials(FLASH, 1, **options) if t.op is op]
        return max(sizes)

    assert {op for op in Op if most(op) < PREFILL} == {Op.FP8_LINEAR, Op.MLA_DECODE}
    assert most(Op.FP8_LINEAR, large_products=True) == PREFILL


CONCLUSIVE = st.one_of(
    st.builds(lambda t: {"microseconds": t}, st.floats(0.1, 1e6)), st.just({"fault": "wrong: rms above 5e-3"})
)
TRANSIENT = st.sampled_from([
    {"fault": "not done after 20 s"}, {"fault": "its process was ended by SIGKILL"}, {"fault": "not here: no package"},
    {"fault": "OutOfMemoryError: full"}, {"fault": "AssertionError: wrong: shape"}, {},
])  # fmt: skip
NAMES = (BUNDLED, "marlin")
JOBS = tuple((Op.MOE, name) for name in NAMES)
START = st.fixed_dictionaries({(name, t.name): st.one_of(CONCLUSIVE, TRANSIENT) for name in NAMES for t in TRIED})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(START, min_size=1, max_size=6))
def test_only_conclusive_outcomes_are_kept_over_any_starts(starts: list[dict[tuple[str, str], dict[str, Any]]]) -> None:
    """In any sequence, no transient fault excludes before the third start, and a conclusive result is kept."""
    kept, failed = Kept(), dict.fromkeys(NAMES, 0)
    for start in starts:
        wanted = kept.open(JOBS, TRIED)
        now = [
            Seen(Op.MOE, trial, name, **outcome) for (name, trial), outcome in start.items() if (Op.MOE, name) in wanted
        ]
        kept = Kept.from_dict(json.loads(json.dumps(kept.after(now, TRIED).to_dict())))
        for one in kept.seen:
            assert one.microseconds is not None if one.fault is None else one.fault == "wrong: rms above 5e-3"
        for name in NAMES:
            mine = {one.trial: one for one in kept.seen if one.provider == name}
            wrong, whole = any(one.fault for one in mine.values()), len(mine) == len(TRIED)
            if (Op.MOE, name) in wanted and not wrong and not whole:
                failed[name] += 1
            assert kept.is_decided((Op.MOE, name), TRIED) == (wrong or whole or failed[name] >= STARTS)
        assert {(one.provider, one.trial) for one in kept.outcomes(TRIED)} >= {
            (name, trial.name) for name in NAMES for trial in TRIED if not any(
                one.fault for one in kept.seen if one.provider == name
            )
        }  # fmt: skip
    assert set(kept.open(JOBS, TRIED)) <= set(JOBS)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_trial_is_a_shape_that_its_operation_supports(tensor_parallel: int) -> None:
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
