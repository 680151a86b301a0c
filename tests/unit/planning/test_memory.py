"""The memory plan: logged runs, rules for every plan, and advice."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan import broken, followed_advice, random_case

from dsv4_operator.api import parse
from dsv4_operator.planning.catalog import GIB, Machine, machine_named, model
from dsv4_operator.planning.catalog.records import Part
from dsv4_operator.planning.images import profile_named
from dsv4_operator.planning.memory import EngineSettings, FitVerdict, MemoryPlan, Parallel, advice, memory_plan
from dsv4_operator.planning.memory.items import stages
from dsv4_operator.planning.memory.kv import layout
from dsv4_operator.planning.memory.plan import deployment_plan, longest_context
from dsv4_operator.planning.memory.runs import runs
from dsv4_testkit.errors import raises_naming
from dsv4_testkit.planfixtures import Case, Row, accuracy, rows, verdicts

SPARK, RTX = machine_named("gb10"), machine_named("rtx-pro-6000-workstation")
SMALL = EngineSettings(131_072, 4, 4096)


def pro(**values: object) -> MemoryPlan:
    engine = replace(EngineSettings(16_384, 2, 2048, gpu_memory_utilization=0.88), **values)  # type: ignore[arg-type]
    return memory_plan(model("V4-Pro"), SPARK, Parallel(8), engine)


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.group}: {row.name}")
def test_logged_runs(row: Row) -> None:
    assert row.good, f"logged {row.logged} {row.unit}, planned {row.planned} ({100 * row.error:+.1f} %)"


def test_plans_of_logged_starts_are_accurate() -> None:
    found = accuracy()
    assert found.good, found
    assert [run.name for run in runs() if run.failed is run.plan.fits] == [], "a start that failed, or one that served"


def test_a_request_of_patched_v41_is_as_logged() -> None:
    """tonyd2wild: 3.44 requests, 1,032,963 tokens, in 4.84 GiB; docs/RECIPE.md."""
    engine = EngineSettings(300_000, 8, 8192, speculative_tokens=5, kv_cache_memory=int(4.84 * GIB))
    engine = replace(engine, build=profile_named("spark-dsv41").build)
    kv = memory_plan(model("V4.1-Flash"), SPARK, Parallel(4), engine).kv
    assert kv is not None
    assert kv.tokens == pytest.approx(1_032_963, rel=1e-4)


@pytest.mark.parametrize(
    ("context", "batched", "millions"), [(300_000, 8192, 2.56), (1_000_000, 8192, 3.41), (1_000_000, 16_384, 2.99)]
)
def test_requests_of_patched_v41_at_other_contexts_are_as_logged(context: int, batched: int, millions: float) -> None:
    """bot-lab-21/DeepSeek-V4.1-Flash-EXL3-3.5bpw-Pollard, README: tokens in 12 GiB, other weights, the same cache."""
    engine = EngineSettings(context, 8, batched, speculative_tokens=5, kv_cache_memory=12 * GIB)
    engine = replace(engine, build=profile_named("spark-dsv41").build)
    kv = memory_plan(model("V4.1-Flash"), SPARK, Parallel(4), engine).kv
    assert kv is not None
    assert round(kv.tokens / 1e6, 2) == millions


def test_negative_non_torch_memory_is_explained() -> None:
    for run in runs():
        item = next(item for item in run.plan.ranks[0].items if item.name == "non-torch memory")
        assert item.note.startswith("negative: ") is (item.bytes < 0)


@pytest.mark.parametrize("profile", ["spark-dsv41", "spark-b12x", "vllm-0.33"])
@pytest.mark.parametrize("name", ["V4.1-Flash", "V4-Flash-0731"])
def test_images_take_memory_of_the_profile_where_there_is_a_vision_tower(profile: str, name: str) -> None:
    def items(*args: str) -> dict[str, int]:
        spec = {
            "model": {"variant": "Flash", "source": {"path": f"/models/{name}"}, "servedNames": ["m"]},
            "topology": {"hardware": "GB10", "nodesPerGroup": 4, "tensorParallelSize": 4},
            "engine": {"profile": profile, "extraArgs": list(args), "maxModelLen": 32_768},
        }
        made = parse(
            {"apiVersion": "dsv4.dev/v1alpha1", "kind": "DSV4Deployment", "metadata": {"name": "a"}, "spec": spec}
        )
        plan = deployment_plan(made, model(name), SPARK, profile_named(profile))
        return {item.name: item.bytes for item in plan.ranks[0].items}

    both, text = items(), items("--language-model-only")
    assert both.pop("images in the profile", 0) == (int(0.9 * GIB) if name == "V4.1-Flash" else 0)
    assert both == text


def test_a_request_of_b12x_builds_for_spark_is_as_logged() -> None:
    engine = EngineSettings(2**20, 8, 8192, speculative_tokens=5, build=profile_named("spark-b12x").build)
    kv = memory_plan(model("V4-Flash-0731"), SPARK, Parallel(2), engine).kv
    assert kv is not None
    assert kv.blocks_per_request == 11_825


@pytest.mark.parametrize(("tensor", "buffers"), [(2, 6.0), (4, 5.0), (8, 4.5)])
def test_buffers_of_the_loader_reduce_the_cache_on_unified_memory_only(tensor: int, buffers: float) -> None:
    for kind, size in ((SPARK, 0.46 * buffers), (RTX, 0.0)):
        plans = [
            memory_plan(model("V4-Flash"), kind, Parallel(tensor), replace(SMALL, load_format=name))
            for name in ("safetensors", "instanttensor")
        ]
        less = plans[0].ranks[0].kv_available - plans[1].ranks[0].kv_available
        assert less / GIB == pytest.approx(size, abs=0.01)
    smaller = replace(SMALL, load_format="instanttensor", loader_ring=GIB, loader_windows=GIB // 2)
    bounded = memory_plan(model("V4-Flash"), SPARK, Parallel(tensor), smaller)
    assert {item.name: item.bytes for item in bounded.ranks[0].items}["load format"] == int(0.46 * 1.5 * GIB)


def test_buffers_of_a_load_format_without_a_log_are_uncertain() -> None:
    for name, most in (("own_format", 2 * GIB), ("runai_streamer", 2 * GIB), ("safetensors", 0), ("ipc_cache", 0)):
        plan = memory_plan(model("V4-Flash"), SPARK, Parallel(2), replace(SMALL, load_format=name))
        assert sum(item.most for item in plan.ranks[0].items if item.name == "load format") == most


@pytest.mark.parametrize("case", verdicts(), ids=lambda case: case.name)
def test_known_verdicts(case: Case) -> None:
    assert case.right, f"{case.planned}, and it {'served' if case.known else 'did not'}"


@pytest.mark.parametrize(
    ("name", "drafts", "groups", "block"),
    [("V4-Flash", 0, 5, 1_002_240), ("V4-Flash", 1, 5, 1_002_240), ("V4-Pro", 0, 5, 1_435_968), ("Nano", 0, 5, 93_888)],
)
def test_blocks_are_laid_out_as_vllm_does(name: str, drafts: int, groups: int, block: int) -> None:
    found = layout(model(name), "fp8_ds_mla", drafts)
    assert (len(found.groups), found.bytes_per_block(range(100))) == (groups, block)


def test_the_nano_model_is_planned_as_vllm_logs_it() -> None:
    """vLLM 0.32 with 512 MiB: 13,809 tokens, 13.49x; tests/engine/test_plan_agrees.py measures it again."""
    cpu = replace(machine_named("cpu"), memory_bytes=8 * GIB)
    plan = memory_plan(model("Nano"), cpu, Parallel(2), EngineSettings(1024, 4, 512, kv_cache_memory=GIB // 2))
    assert plan.kv is not None
    assert (plan.kv.blocks, plan.kv.tokens, f"{plan.kv.concurrency:.2f}") == (5718, 13_809, "13.49")
    assert plan.fits


@pytest.mark.parametrize(
    ("pipeline", "sizes"), [(1, [61]), (2, [31, 30]), (4, [15, 15, 16, 15]), (8, [7, 7, 8, 8, 8, 8, 8, 7])]
)
def test_stages(pipeline: int, sizes: list[int]) -> None:
    found = stages(61, pipeline)
    assert [len(layers) for layers in found] == sizes
    assert [layer for layers in found for layer in layers] == list(range(61))


def test_stages_have_all_weights_once() -> None:
    whole = memory_plan(model("V4-Flash"), SPARK, Parallel(1), SMALL)
    cut = memory_plan(model("V4-Flash"), SPARK, Parallel(1, 4), SMALL)
    assert sum(rank.items[0].bytes for rank in cut.ranks) == whole.ranks[0].items[0].bytes


def test_expert_parallelism_moves_no_bytes_where_rows_divide() -> None:
    one, other = (memory_plan(model("V4-Flash"), SPARK, Parallel(4, expert=expert), SMALL) for expert in (False, True))
    assert one.ranks[0].items[0] == other.ranks[0].items[0]


@pytest.mark.parametrize(
    ("name", "parallel", "message"),
    [
        ("V4-Flash", Parallel(3), "64 heads in 8 output groups; use tensorParallelSize 1 with pipelineParallelSize 3$"),
        ("V4-Flash", Parallel(16), "use tensorParallelSize 8 with pipelineParallelSize 2$"),
        ("V4.1-Flash", Parallel(3), "use one of 1, 2, 4, 8$"),
        ("V4-Pro", Parallel(1, 62), "has 61 layers; use 1 to 61"),
        (
            "V4-Flash",
            Parallel(1, 12),
            "the stage from layer 0 on would have no layer with compress_ratio 128; use one of",
        ),
        ("Nano", Parallel(1, 3), "the stage from layer 0 on would have no layer with compress_ratio 4; use 1$"),
    ],
)
def test_indivisible_models_are_refused(name: str, parallel: Parallel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory_plan(model(name), SPARK, parallel, SMALL)


def test_asynchronous_scheduling_doubles_the_tokens_in_flight() -> None:
    both, one = pro().kv, pro(async_scheduling=False).kv
    assert both is not None
    assert one is not None
    assert (both.in_flight_tokens, one.in_flight_tokens) == (4096, 2048)
    assert both.in_flight_bytes > 1.9 * one.in_flight_bytes


def test_a_plan_that_does_not_fit_has_a_reason_and_fitting_changes() -> None:
    plan = pro()
    assert (plan.fits, plan.verdict) == (False, FitVerdict.UNCERTAIN)
    assert plan.problem.startswith(
        "rank 0: the engine may use 107.09 GiB (0.88 of 121.69 GiB), of which 101.94 GiB of "
    )
    assert pro(max_model_len=131_072, max_num_batched_tokens=8192).verdict is FitVerdict.NO
    assert plan.short_bytes > 0
    changes = tuple(advice(plan))
    assert any(change.settings.get("topology.nodesPerGroup") == 16 for change in changes)
    assert all(change.plan.fits for change in changes)


def test_more_machines_for_cards_that_cannot_hold_the_weights() -> None:
    plan = memory_plan(model("V4-Pro"), RTX, Parallel(8, 1, 8), EngineSettings(131_072, 8, 4096))
    assert plan.problem is not None
    assert re.findall(r"rank \d|[\d.]+ GiB", plan.problem) == ["rank 0", "101.94 GiB", "94.97 GiB"]
    assert [next(iter(change.settings)) for change in advice(plan)] == ["topology.nodesPerGroup"]


def test_too_great_a_share_is_advised_down() -> None:
    plan = memory_plan(model("V4-Flash"), SPARK, Parallel(2), replace(SMALL, gpu_memory_utilization=0.97))
    assert plan.problem.startswith("rank 0: all components together need")
    assert any(change.settings.get("engine.gpuMemoryUtilization", 0) >= 0.9 for change in advice(plan))  # type: ignore[operator]


@pytest.mark.parametrize(("mebibytes", "advised"), [(1, 3697), (900 * 1024, 34074)])
def test_a_cache_of_fixed_size_is_advised_up_and_down(mebibytes: int, advised: int) -> None:
    engine = EngineSettings(131_072, 4, 4096, kv_cache_memory=mebibytes * 2**20)
    changes = list(advice(memory_plan(model("V4-Flash"), SPARK, Parallel(2), engine)))
    assert changes[0].settings == {"engine.kvCacheMemory": f"{advised}Mi"}


def test_more_machines_and_a_share_that_suits_them() -> None:
    engine = EngineSettings(131_072, 4, 4096, kv_cache_memory=900 * GIB)
    changes = list(advice(memory_plan(model("V4-Pro"), RTX, Parallel(8, 1, 8), engine)))
    assert list(changes[0].settings.items())[:3] == [
        ("engine.kvCacheMemory", None),
        ("topology.nodesPerGroup", 2),
        ("topology.tensorParallelSize", 8),
    ]


def test_the_longest_context_is_the_longest() -> None:
    plan = memory_plan(model("V4-Flash"), RTX, Parallel(2, 1, 2), EngineSettings(1024, 8, 4096))
    longest = longest_context(plan)
    assert memory_plan(plan.model, RTX, plan.parallel, replace(plan.engine, max_model_len=longest)).fits
    assert (
        longest == 2**20
        or not memory_plan(plan.model, RTX, plan.parallel, replace(plan.engine, max_model_len=longest + 1024)).fits
    )


def test_a_model_without_a_known_cache_never_fits() -> None:
    plan = memory_plan(replace(model("V4-Flash"), kv_known=False), SPARK, Parallel(8), SMALL)
    assert plan.kv is None
    assert not plan.fits
    assert "the layout of the KV cache of this model is not known" in plan.problem
    assert tuple(advice(plan)) == ()


@pytest.mark.parametrize(("drafts", "tokens", "windows"), [(0, 0, 4), (3, 5, 4), (3, 7, 4)])
def test_layers_that_share_a_cache_are_laid_out_as_vllm_does(drafts: int, tokens: int, windows: int) -> None:
    """test_vllm_plans.py compares with vLLM itself."""
    found = layout(model("V4.1-Flash"), "fp8_ds_mla", drafts, tokens)
    assert found.bytes_per_block(range(100)) == 230_400
    assert [group.window for group in found.groups] == [128] * windows + [0, 0]
    # The whole context once, the window in each group of its own, and one ring of fixed size.
    assert found.blocks_per_request(1024, 512) == 8 + windows * (20 + 1) + 1
    assert found.blocks_per_request(2048, 512) == 16 + windows * (20 + 1) + 1


def test_how_v41_fits() -> None:
    flash = model("V4.1-Flash")
    with raises_naming(ValueError, "layer 10", "use one of 1, 2"):
        memory_plan(flash, SPARK, Parallel(2, 4), SMALL)
    with pytest.raises(ValueError, match="nvfp4_ds_mla on SM100 only"):
        memory_plan(flash, SPARK, Parallel(8), replace(SMALL, kv_dtype="nvfp4_ds_mla"))
    four = memory_plan(flash, SPARK, Parallel(4), SMALL)
    assert "the weights need" in four.problem
    (change,) = advice(four)
    assert change.settings == {"topology.nodesPerGroup": 8, "topology.tensorParallelSize": 8}
    assert change.plan.fits
    # If 16 machines have no suitable division, fewer machines may have one.
    pair = memory_plan(flash, RTX, Parallel(2, 1, 2), SMALL)
    (change,) = advice(pair)
    sizes = {"topology.tensorParallelSize": 2, "topology.pipelineParallelSize": 2}
    assert change.settings == {"topology.nodesPerGroup": 2, **sizes}
    # With RTX the tables are in the host's memory; a Spark has only one memory, which contains them.
    assert Part.ENGRAM not in dict(pair.ranks[0].weights)
    assert dict(four.ranks[0].weights)[Part.ENGRAM] > 45 * GIB


def test_advice_of_refusals_is_accepted() -> None:
    changes, problem = followed_advice(60)
    assert not problem
    assert changes > 60


@given(st.integers(min_value=0, max_value=2**32))
@settings(max_examples=300, deadline=None)
def test_no_plan_fits_beyond_its_memory(seed: int) -> None:
    try:
        plan = memory_plan(*random_case(random.Random(seed)))  # type: ignore[arg-type]
    except ValueError:  # this division is impossible
        return
    assert broken(plan) == ""


@given(st.integers(min_value=1, max_value=200), st.sampled_from(["V4-Flash", "V4-Pro", "Nano"]))
@settings(max_examples=40, deadline=None)
def test_a_plan_that_fits_also_fits_with_more_memory(gibibytes: int, name: str) -> None:
    def on(size: int) -> MemoryPlan:
        kind: Machine = replace(SPARK, memory_bytes=size * GIB)
        return memory_plan(model(name), kind, Parallel(2), SMALL)

    less, more = on(gibibytes), on(gibibytes + 1)
    assert more.fits or not less.fits
