"""Image profiles: their properties, and the settings that they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_operator.api import BuildSpec, Executor, Hardware, KvCacheDtype, SpeculativeMethod
from dsv4_operator.planning.images import own_profile, profile_for, profile_named, profiles, variable_problem
from dsv4_operator.planning.images.surface import Problem, argument_problems, surface_document

ROOT = Path(__file__).parents[3]


def problems(*args: str, profile: str = "vllm-0.33") -> list[tuple[int, Problem]]:
    return list(argument_problems(args, profile_named(profile).surface))


def test_every_profile_has_sources_and_a_surface() -> None:
    assert len({profile.name for profile in profiles()}) == len(profiles())
    for profile in profiles():
        assert profile.sources
        assert all(len(source.date) == len("2026-11-21") for source in profile.sources)
        assert len(profile.surface.flags) > 250
        assert profile.executors
        assert set(profile.hardware) <= set(Hardware)
        assert not list(argument_problems([f"{k}={v}" for k, v in profile.args.items()], profile.surface))
        assert not [name for name, value in profile.env.items() if variable_problem(name, value, profile)]


def test_the_compiled_graph_executor_ends_with_0_32() -> None:
    assert Executor.RAY_LEGACY in profile_named("vllm-0.32").executors
    assert Executor.RAY_LEGACY not in profile_named("vllm-0.33").executors
    assert "VLLM_USE_RAY_V2_EXECUTOR_BACKEND" in profile_named("vllm-0.32").surface.env
    assert "VLLM_USE_RAY_V2_EXECUTOR_BACKEND" not in profile_named("vllm-0.33").surface.env


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("vllm/vllm-openai:v0.33.0", "vllm-0.33"),
        ("vllm/vllm-openai:v0.32.1@sha256:" + "0" * 64, "vllm-0.32"),
        ("eugr/spark-vllm-b12x:latest", "spark-b12x"),
        ("ghcr.io/local-inference-lab/vllm@sha256:" + "0" * 64, "rtx-b12x"),
        ("eugr/spark-vllm-b12xx", None),
        ("example.org/own", None),
    ],
)
def test_an_image_has_the_profile_of_its_name(image: str, name: str | None) -> None:
    found = profile_for(image, Hardware.GB10)
    assert (found.name if found else None) == name


def test_without_an_image_the_hardware_decides() -> None:
    assert [getattr(profile_for(None, hardware), "name", None) for hardware in Hardware] == [
        "vllm-cpu-0.32",
        *["vllm-0.33"] * 4,
    ]


@pytest.mark.parametrize(
    ("args", "value", "remedy"),
    [
        (["--sed", "1"], "--sed", "did you mean --seed?"),
        (["--seed", "x"], "x", "write for example 1"),
        (["--seed"], "--seed", "write --seed=VALUE"),
        (["--moe-backend=marlinn"], "marlinn", "did you mean marlin?"),
        (["--load-format=instantensor"], "instantensor", "did you mean instanttensor?"),
        (["--watermark=1.0"], "1.0", "write less than 1"),
        (["--block-size", "0"], "0", "write more than 0"),
        (["--max-logprobs", "-2"], "-2", "the minimum is -1"),
        (["--cudagraph-capture-sizes", "4", "-1"], "-1", "the minimum is 1"),
        (["--enforce-eager", "yes"], "yes", "remove it"),
        (["--kernel-config={"], "{", 'write for example {"key": 1}, in single quotes'),
        (["--seed.x", "1"], "--seed.x", "write --seed VALUE"),
        (["-cc.mode"], "-cc.mode", "write -cc.mode=VALUE"),
        (["--middleware-x"], "--middleware-x", "did you mean --middleware?"),
    ],
)
def test_arguments_that_the_parser_refuses_are_reported(args: list[str], value: str, remedy: str) -> None:
    ((index, problem),) = problems(*args)
    assert (index, problem.value, problem.remedy) == (0, value, remedy)
    flag = args[0].partition("=")[0]
    assert flag in (problem.value, *problem.message.replace(",", "").split())


@pytest.mark.parametrize(
    "args",
    [
        ["--seed", "-1"],
        ["--no-scheduler-reserve-full-isl"],
        ["--no-enable-prefix-caching"],
        ["--disable-prefix-caching"],
        ["--long_prefill_token_threshold=4096"],
        ["--default-chat-template-kwargs.thinking=true"],
        ["-cc.mode", "3"],
        ["--max-num-scheduled-tokens", "4k"],
        ["--cudagraph-capture-sizes", "1", "2", "4"],
        ["--load-format", "runai_streamer"],
        ["--api-key", "a", "b"],
        ["--kernel-config", '{"enable_jit_warmup": true}'],
    ],
)
def test_valid_arguments_are_accepted(args: list[str]) -> None:
    assert problems(*args) == []


def test_a_flag_of_another_version_is_unknown() -> None:
    assert problems("--watchdog-config={}") == []
    ((_, problem),) = problems("--watchdog-config={}", profile="vllm-0.32")
    assert (problem.value, problem.message) == ("--watchdog-config", "is unknown to vLLM 0.32.0")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("VLLM_EXECUTE_MODEL_TIMEOUT", "3", "did you mean VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS?"),
        ("NCCL_IB_HCAS", "x", "did you mean NCCL_IB_HCA?"),
        ("RAY_memory_monitor_refresh", "0", "did you mean RAY_memory_monitor_refresh_ms?"),
        ("TRITON_CACHE_DIRS", "/x", "did you mean TRITON_CACHE_DIR?"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "thread", "use one of fork, spawn"),
        ("VLLM_RINGBUFFER_WARNING_INTERVAL", "soon", "write for example 1"),
        ("VLLM_USE_B12X_MOE", "1", "remove it, or set spec.engine.profile to spark-b12x"),
        ("NCCL_BUFFSIZE", "4G", "write for example 1"),
        ("INSTANTTENSOR_BUFFER_SIZE", "-1", "the minimum is 0"),
    ],
)
def test_unknown_variables(name: str, value: str, remedy: str) -> None:
    problem = variable_problem(name, value, profile_named("vllm-0.33"))
    assert problem is not None
    assert problem.value in (name, value)
    assert problem.remedy == remedy


def test_known_and_general_variables_are_accepted() -> None:
    stock, b12x = profile_named("vllm-0.33"), profile_named("spark-b12x")
    assert variable_problem("HF_HOME", "/x", stock) is None
    assert variable_problem("NCCL_DEBUG", "INFO", stock) is None
    assert variable_problem("VLLM_USE_B12X_MOE", "1", b12x) is None


def test_the_surface_of_the_installed_vllm_is_fresh() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    made = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/image_surface.py"), "vllm"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=True,
    )
    document = json.loads(made.stdout[made.stdout.index("{") :])
    assert document == surface_document(f"vllm-{document['vllm']}")


@pytest.mark.parametrize("written", ["--max-num-seqs 4", "--max-num-seqs4", "--max_num_seqs 4"])
def test_a_missing_equals_sign_is_suggested(written: str) -> None:
    ((index, problem),) = argument_problems([written], profile_named("vllm-0.33").surface)
    assert (index, problem.value) == (0, written)
    assert problem.remedy == f"write {written[:14]}=4"


def test_a_custom_build_differs_from_its_base_only_in_declared_fields() -> None:
    base = profile_named("spark-b12x")
    same = own_profile(BuildSpec(base="spark-b12x"))
    assert replace(same, name=base.name) == base
    own = own_profile(
        BuildSpec(
            base="spark-b12x",
            flags=("--own",),
            variables=("VLLM_OWN",),
            load_formats=("own",),
            kv_cache_dtypes=(KvCacheDtype.FP8,),
            speculative=(SpeculativeMethod.DSPARK,),
            least_draft_tokens=7,
            tensor_parallel_sizes=(3,),
            weights_factor=1.25,
            non_torch_gib=-2.0,
        )
    )
    assert own.surface.flag("--own") == "--own"
    assert base.surface.flag("--own") is None
    assert variable_problem("VLLM_OWN", "1", own) is None
    assert [*argument_problems(["--load-format=own"], own.surface)] == []
    assert [*argument_problems(["--load-format=own"], base.surface)]
    assert (own.load_formats, own.kv_cache_dtypes, own.speculative) == (("own",), ("fp8",), ("dspark",))
    assert own.dspark_least_tokens == 7
    assert 3 in own.build.padded_tensor
    assert own.build.other is not None
    assert (own.build.tensors.expected, own.build.experts.most, own.build.other.expected) == (1.25, 1.0, -2.0)
    with pytest.raises(KeyError):
        own_profile(BuildSpec(base="none"))
