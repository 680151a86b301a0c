"""The processes that compile vLLM's top-k and top-p beside the weights."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4_kernels.arch import Arch
from dsv4_runtime.vllm_plugin.kernels import sampling_ahead as ahead


def worker(*, jit: bool = True, rank: int = 0, second: bool = True) -> Any:
    config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=jit))
    return SimpleNamespace(vllm_config=config, local_rank=rank, use_v2_model_runner=second)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ahead, "has_cuda", lambda: False)
    monkeypatch.setattr(ahead, "_arch", lambda: Arch.SM_120)
    monkeypatch.setattr(ahead, "compilers", lambda: 6)
    yield
    ahead.finish()


def test_every_share_is_compiled_while_the_worker_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_share(config: Any, arch: Arch, share: int, shares: int) -> None:
        # Until the worker has its device, which it gets without waiting.
        until = time.monotonic() + 10
        while not (tmp_path / "device").exists() and time.monotonic() < until:
            time.sleep(0.01)
        (tmp_path / f"{arch} {share} of {shares}").touch()

    monkeypatch.setattr(ahead, "compile_share", compile_share)
    ahead.before_device(lambda worker: (tmp_path / "device").touch())(worker())
    with caplog.at_level(logging.INFO, "vllm.dsv4"):
        ahead.finish()
    assert sorted(found.name for found in tmp_path.glob("sm_*")) == [f"sm_120 {i} of 3" for i in range(3)]
    assert caplog.messages[0].startswith("dsv4 sampling: 3 of 3 processes compiled top-k and top-p beside the weights")


def test_processes_that_fail_or_are_late_keep_no_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_share(config: Any, arch: Arch, share: int, shares: int) -> None:
        if share == 0:
            raise ImportError("no such kernels")
        if share == 1:
            time.sleep(60)

    monkeypatch.setattr(ahead, "compile_share", compile_share)
    monkeypatch.setattr(ahead, "_FINISH_SECONDS", 0.5)
    ahead.begin(worker())
    late = ahead._CHILDREN[1]
    begun = time.monotonic()
    with caplog.at_level(logging.INFO, "vllm.dsv4"):
        ahead.finish()
    assert time.monotonic() - begun < 10
    assert caplog.messages[0].startswith("dsv4 sampling: 1 of 3 processes")
    with pytest.raises(ProcessLookupError):
        os.kill(late, 0)


@pytest.mark.parametrize(
    ("idle", "cuda", "arch"),
    [
        (worker(jit=False), False, Arch.SM_120),
        (worker(rank=1), False, Arch.SM_120),
        (worker(second=False), False, Arch.SM_120),
        (worker(), True, Arch.SM_120),
        (worker(), False, None),
    ],
    ids=["no warm-up", "another rank", "vLLM's first runner", "CUDA in use", "an unknown card"],
)
def test_no_process_where_nothing_is_to_be_compiled(
    monkeypatch: pytest.MonkeyPatch, idle: Any, cuda: bool, arch: Arch | None
) -> None:
    monkeypatch.setattr(ahead, "has_cuda", lambda: cuda)
    monkeypatch.setattr(ahead, "_arch", lambda: arch)
    ahead.begin(idle)
    assert not ahead._CHILDREN


def test_a_worker_that_cannot_fork_gets_its_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_child(function: Any) -> int:
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(ahead, "start_child", no_child)
    done: list[Any] = []
    with caplog.at_level(logging.WARNING, "vllm.dsv4"):
        ahead.before_device(done.append)(worker())
    assert len(done) == 1
    assert "nothing is compiled beside the weights: OSError: Resource temporarily" in caplog.messages[0]


def test_one_kernel_that_fails_leaves_the_others() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError

    ahead.compile_all([fail, lambda: done.append(1), fail, lambda: done.append(2)])
    assert done == [1, 2]


def test_vllms_own_kernels_are_compiled_for_another_machine(tmp_path: Path) -> None:
    """The installed vLLM's, without a GPU; a second process with the same share finds all of them in Triton's cache."""
    script = Path(__file__).with_name("top_k_top_p_with_vllm.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "VLLM_PLUGINS": ""}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append((json.loads(done.stdout.splitlines()[-1]), {one.name for one in tmp_path.glob("*/*.cubin")}))
    (first, cubins), (second, again) = found
    assert (first["calls"], second["calls"]) == (first["kernels"], 0), "the second process compiles nothing"
    assert first["kernels"] >= 1
    assert again == cubins
