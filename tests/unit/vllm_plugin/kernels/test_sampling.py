"""Changes around vLLM's sampler: no FlashInfer where it is missing, and a warm-up whose failure ends no engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_runtime.vllm_plugin.kernels import compile_ahead


def worker(*, jit: bool = True, last: bool = True, sampler: object = None, most: int = 64) -> Any:
    runner = SimpleNamespace(is_last_pp_rank=last, sampler=sampler, max_num_reqs=most)
    config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=jit))
    return SimpleNamespace(model_runner=runner, vllm_config=config, use_v2_model_runner=True)


def missing() -> bool:
    raise ModuleNotFoundError("No module named 'flashinfer'")


@pytest.fixture
def no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)


@pytest.mark.usefixtures("no_wish")
@pytest.mark.parametrize("answer", [True, False])
def test_vllm_decides_where_flashinfer_is_there(answer: bool) -> None:
    assert compile_ahead.without_flashinfer(lambda: answer)() is answer


@pytest.mark.usefixtures("no_wish")
def test_without_flashinfer_vllm_samples_itself() -> None:
    assert compile_ahead.without_flashinfer(missing)() is False


def test_an_explicit_request_for_missing_flashinfer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    with pytest.raises(ImportError, match="flashinfer"):
        compile_ahead.without_flashinfer(missing)()


@pytest.mark.parametrize(
    "idle",
    [worker(jit=False, sampler=object()), worker(last=False, sampler=object()), worker(sampler=None)],
    ids=["no warm-up", "an earlier stage", "no sampler"],
)
def test_nothing_is_sampled_where_nothing_is_to_be_compiled(idle: Any) -> None:
    assert compile_ahead.warm_up_sampler(idle) == 0


def test_the_warm_up_comes_before_vllms_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def determine_available_memory(worker: Any) -> int:
        order.append("profile")
        return 7

    def warm_up(worker: Any) -> int:
        order.append("sampler")
        return 3

    monkeypatch.setattr(compile_ahead, "warm_up_sampler", warm_up)
    assert compile_ahead.before_profile(determine_available_memory)(object()) == 7
    assert order == ["sampler", "profile"]


def test_a_sampler_that_cannot_be_warmed_up_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.dsv4"):
        # Its runner has no model that could compute logits.
        assert compile_ahead.before_profile(lambda worker: 7)(worker(sampler=object())) == 7
    (record,) = caplog.records
    assert record.getMessage().startswith("dsv4 sampling: not compiled before it serves (AttributeError: ")


def test_all_kinds_are_sampled_alone_and_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["any", "greedy"]
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(compile_ahead, "sampling_requests", lambda: iter(kinds))
    monkeypatch.setattr(compile_ahead, "_logits", lambda runner, rows: torch.zeros(rows, 512))
    monkeypatch.setattr(compile_ahead, "compile_top_k_top_p", lambda config, stride: done.append(("top-k", stride)))
    monkeypatch.setattr(compile_ahead, "_sample", lambda runner, logits, of: done.append((len(logits), *of)))
    assert compile_ahead.warm_up_sampler(worker(sampler=object(), most=6)) == 2
    assert done == [("top-k", 512), (1, "any", "greedy"), (2, "any", "greedy")]
