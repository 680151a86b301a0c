"""Functions that run in a forked child, and the inspection of a model's class, which is one of them."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from dsv4_runtime.vllm_plugin import forking
from dsv4_runtime.vllm_plugin.forking import ForkError, call_in_child, has_cuda


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "has_cuda", lambda: False)


def test_a_child_of_this_process_answers(capfd: pytest.CaptureFixture[str]) -> None:
    here = object()

    def answer() -> tuple[int, int, str]:
        os.write(1, b"not shown")
        return os.getppid(), id(here), "x" * 1_000_000

    assert call_in_child(answer, 10.0) == (os.getpid(), id(here), "x" * 1_000_000)
    assert capfd.readouterr() == ("", "")


def fails() -> None:
    raise ValueError("no such model")


@pytest.mark.parametrize(
    ("function", "seconds", "said"),
    [
        (fails, 120.0, "exit code 1"),
        (lambda: os.kill(os.getpid(), 9), 120.0, "exit code -9"),
        (lambda: time.sleep(600), 0.2, "not done after 0 s"),
    ],
)
def test_a_child_that_has_no_answer(function: Callable[[], Any], seconds: float, said: str) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(ForkError, match=said):
        call_in_child(function, seconds)
    assert not set(psutil.Process().children()) - before, "it is gone, and waited for"


@pytest.mark.parametrize(("answer", "there"), [(3, False), (0, True), (999, True)])
def test_use_of_cuda_is_read_from_the_driver(monkeypatch: pytest.MonkeyPatch, answer: int, there: bool) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: SimpleNamespace(cuCtxGetCurrent=lambda context: answer))
    assert has_cuda() is there


def test_without_a_driver_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert forking.has_cuda() is False


def test_with_cuda_the_inspection_runs_in_vllms_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "has_cuda", lambda: True)
    run = forking.in_fork(lambda fn: ("vLLM's own", fn()))
    assert run(os.getpid) == ("vLLM's own", os.getpid())


@pytest.mark.usefixtures("no_cuda")
def test_a_fork_is_tried_first(caplog: pytest.LogCaptureFixture) -> None:
    run = forking.in_fork(lambda fn: ("vLLM's own", None))
    with caplog.at_level("INFO", "vllm.dsv4"):
        assert run(os.getppid) == os.getpid()
        assert run(fails) == ("vLLM's own", None)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "again in a process of its own (ForkError: exit code 1)" in caplog.text


def test_the_inspection_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def _run_in_subprocess(fn: Callable[[], Any]) -> Any: ...

    registry = SimpleNamespace(_run_in_subprocess=_run_in_subprocess)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.registry", registry)
    for _ in range(2):
        forking.inspect_in_fork()
        assert registry._run_in_subprocess.__wrapped__ is _run_in_subprocess


@pytest.mark.parametrize(
    ("torchs", "others", "spawned"), [(False, False, False), (True, False, True), (False, True, True)]
)
def test_an_engine_is_not_forked_where_anything_uses_cuda(
    monkeypatch: pytest.MonkeyPatch, torchs: bool, others: bool, spawned: bool
) -> None:
    monkeypatch.setattr(forking, "has_cuda", lambda: others)
    assert forking.or_by_others(lambda: torchs)() is spawned
