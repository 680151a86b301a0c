"""The choice of a process: the log lines that the agent reads, and configurations that use only vLLM's kernels."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_runtime.contract.kernels import BUNDLED, OFF, STOCK, VARIABLE, KernelChoice, Op
from dsv4_runtime.engine.logs import kernels
from dsv4_runtime.vllm_plugin.kernels import choice as module
from dsv4_runtime.vllm_plugin.kernels import trial
from dsv4_runtime.vllm_plugin.kernels.choice import choice, choice_key, refuses, report_lines
from dsv4_runtime.vllm_plugin.kernels.evidence import SIZES, Standing
from dsv4_runtime.vllm_plugin.kernels.trial import Evidence

STANDINGS = (
    Standing(Op.MOE, BUNDLED, 1.0),
    Standing(Op.MOE, "marlin", 1.28049),
    Standing(Op.MOE, "deep_gemm", None, "t1: ValueError: " + "no\n" * 4000),
    Standing(Op.MOE, "cutlass", None, "t1: not here: needs compute capability 10"),
)


def test_the_agent_parses_the_engines_report_lines() -> None:
    lines = report_lines(KernelChoice({Op.MOE: BUNDLED}), STANDINGS, 3)
    assert max(map(len, lines)) < 1024, "the agent cuts lines at 4096"
    assert not any("\n" in line for line in lines)
    found = [kernels(f"(EngineCore pid=1) INFO 11-23 15:02:11 [module.py:71] {line}") for line in lines]
    assert [one and (one[0], one[1].op, one[1].provider) for one in found] == [
        (3, op, BUNDLED if op is Op.MOE else STOCK) for op in Op
    ]
    assert found[0] is not None
    standings = {one.provider: (one.slowness, (one.excluded or "")[:19]) for one in found[0][1].standings}
    assert standings == {BUNDLED: (1.0, ""), "marlin": (1.28, ""), "deep_gemm": (None, "t1: ValueError: no ")}


FOUND = KernelChoice(dict.fromkeys(Op, BUNDLED))
V4 = dict.fromkeys(SIZES, 8)
PARALLEL = {
    "tensor_parallel_size": 2, "data_parallel_size": 1, "enable_expert_parallel": False, "rank": 1,
    "use_ubatching": False, "enable_dbo": False, "ubatch_size": 0, "prefill_context_parallel_size": 1,
    "decode_context_parallel_size": 1,
}  # fmt: skip


def configuration(
    fields: dict[str, Any], parallel: dict[str, Any] | None = None, load_format: str = "auto"
) -> SimpleNamespace:
    """Return the part of vLLM's configuration that the choice reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(**fields)),
        parallel_config=SimpleNamespace(**{**PARALLEL, **(parallel or {})}),
        load_config=SimpleNamespace(load_format=load_format),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=8),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        speculative_config=None,
    )


class Engine:
    """A process of an engine: its configuration, its evidence, and its log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.config: Any = configuration(V4)
        self.asked: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.caplog = caplog
        monkeypatch.setattr(module, "_config", lambda: self.config)
        monkeypatch.setattr(trial, "evidence", self._evidence)
        monkeypatch.setattr(trial, "large_products", lambda: False)
        monkeypatch.setattr(module, "_TOKENS", [0])
        monkeypatch.setenv(VARIABLE, "auto")

    def _evidence(self, model: dict[str, Any], tensor_parallel: int, **cut: Any) -> Evidence:
        self.asked.append({"model": model, "tensor_parallel": tensor_parallel, **cut})
        if self.error is not None:
            raise self.error
        return Evidence({}, (), (), FOUND, 0.0)

    def choose(self) -> tuple[KernelChoice, list[str]]:
        """Return the choice and the warnings."""
        choice.cache_clear()
        self.caplog.clear()
        with self.caplog.at_level(logging.WARNING, "vllm.dsv4"):
            return choice(), [record.getMessage() for record in self.caplog.records]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Engine]:
    yield Engine(monkeypatch, caplog)
    choice.cache_clear()


def test_evidence_is_requested_for_the_shapes_of_the_rank(engine: Engine) -> None:
    engine.config = configuration(V4, {"enable_expert_parallel": True, "data_parallel_size": 4})
    assert engine.choose() == (FOUND, [])
    (asked,) = engine.asked
    assert asked == {
        "model": V4, "tensor_parallel": 2, "data_parallel": 4, "expert_parallel": True, "redundant_experts": 0,
        "large_products": False,
    }  # fmt: skip


@pytest.mark.parametrize(("text", "found", "reported"), [("off", OFF, False), ("", OFF, False), ("auto", FOUND, True)])
def test_an_engine_without_bundled_kernels_reports_no_choice(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, text: str, found: KernelChoice, reported: bool
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    choice.cache_clear()
    with engine.caplog.at_level(logging.INFO, "vllm.dsv4"):
        assert choice_key() == str(found)
    assert bool(engine.caplog.records) is reported


@pytest.mark.parametrize("text", ["auto", "moe=bundled", str(KernelChoice(dict.fromkeys(Op, BUNDLED)))])
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=50
)
@given(
    missing=st.sets(st.sampled_from(SIZES), min_size=1),
    value=st.sampled_from([None, 0, -1, "8", 1.5, True, [], ...]),
    architectures=st.sampled_from([None, [], ["DeepseekV3ForCausalLM"], ["DeepseekV4ForCausalLM"]]),
)
def test_another_model_is_vllms_own(
    engine: Engine, text: str, missing: set[str], value: Any, architectures: list[str] | None
) -> None:
    """A size is missing or has another type: nothing is bundled, no error is raised, and one warning is logged."""
    fields = {name: size for name, size in V4.items() if name not in missing}
    if value is not ...:
        fields |= dict.fromkeys(missing, value)
    if architectures is not None:
        fields["architectures"] = architectures
    engine.config = configuration(fields)
    os.environ[VARIABLE] = text
    found, (warning,) = engine.choose()
    assert found == OFF
    assert warning.startswith(f"dsv4 kernels: {VARIABLE}={text} has no effect")
    assert engine.asked == []


@pytest.mark.parametrize(("names", "known"), [
    (None, True), (["DeepseekV4ForCausalLM"], True), (["DeepSeekV4MTPModel"], True), (["DeepseekV41ForCausalLM"], True),
    (["DeepseekV3ForCausalLM"], False), (["Qwen3MoeForCausalLM", "Other"], False),
])  # fmt: skip
def test_a_model_is_known_by_its_architecture_and_its_sizes(
    engine: Engine, names: list[str] | None, known: bool
) -> None:
    engine.config = configuration({**V4, "architectures": names})
    found, warnings = engine.choose()
    assert (found == FOUND, len(warnings)) == (known, 0 if known else 1)


REFUSED: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"use_ubatching": True}, "auto", "microbatches"), ({"enable_dbo": True}, "auto", "microbatches"),
    ({"ubatch_size": 2}, "auto", "microbatches"), ({"prefill_context_parallel_size": 2}, "auto", "contexts are spread"),
    ({"decode_context_parallel_size": 2}, "auto", "contexts are spread"), ({}, "ipc_cache", "ipc_cache"),
)  # fmt: skip


@pytest.mark.parametrize("text", ["auto", "moe=bundled", str(KernelChoice(dict.fromkeys(Op, BUNDLED)))])
@pytest.mark.parametrize(("parallel", "load_format", "reason"), REFUSED)
def test_an_engine_whose_configuration_does_not_work_is_vllms_own(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, text: str, parallel: dict[str, Any], load_format: str, reason: str
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    engine.config = configuration(V4, parallel, load_format)
    assert reason in str(refuses(engine.config.parallel_config, engine.config.load_config))
    found, (warning,) = engine.choose()
    assert found == OFF
    assert reason in warning
    assert engine.asked == [], "no trial is run"


def test_without_evidence_only_named_operations_are_bundled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.error = RuntimeError("no such device")
    assert engine.choose() == (OFF, ["dsv4 kernels: no choice by evidence (RuntimeError: no such device)"])
    monkeypatch.setenv(VARIABLE, "mhc=bundled")
    found, warnings = engine.choose()
    assert [op for op in Op if found.bundled(op)] == [Op.MHC]
    assert len(warnings) == 1


def test_without_a_configuration_nothing_is_chosen_by_evidence(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.config = None
    found, (warning,) = engine.choose()
    assert (found, engine.asked) == (OFF, [])
    assert "configuration is not set" in warning
    named = KernelChoice({**dict.fromkeys(Op, STOCK), Op.MHC: BUNDLED})
    monkeypatch.setenv(VARIABLE, str(named))
    assert engine.choose() == (named, [])


@pytest.mark.parametrize("place", ["", "missing/report.json", "/proc/version/report", "x" * 5000])
def test_a_report_that_cannot_be_written_is_one_warning(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, place: str
) -> None:
    monkeypatch.setenv(module.REPORT, str(tmp_path / place))
    found, (warning,) = engine.choose()
    assert found == FOUND
    assert "cannot be written" in warning
