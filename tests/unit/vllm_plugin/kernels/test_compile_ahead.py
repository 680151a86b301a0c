"""The processes that compile vLLM's own kernels while the weights are loaded."""

from __future__ import annotations

import functools
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

from dsv4_kernels.arch import Arch, TargetGPU
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import compile_ahead as ahead
from dsv4_testkit.waiting import wait_until

RUNNER = {
    "_apply_grammar_bitmask_kernel": 1,
    "_apply_write_kernel": 5,
    "_bad_words_kernel": 1,
    "_bias_kernel": 2,
    "_bincount_kernel": 1,
    "_combine_sampled_and_draft_tokens_kernel": 1,
    "_compute_slot_mappings_kernel": 1,
    "_gather_block_tables_kernel": 1,
    "_get_num_sampled_and_rejected_kernel": 1,
    "_gumbel_sample_kernel": 2,
    "_min_p_kernel": 1,
    "_penalties_kernel": 1,
    "_post_update_kernel": 1,
    "_prepare_pos_seq_lens_kernel": 1,
    "_prepare_prefill_inputs_kernel": 1,
    "_prompt_logprobs_token_ids_kernel": 1,
    "_ranks_kernel": 1,
    "_temperature_kernel": 1,
    "_token_request_mapping_kernel": 1,
    "_topk_log_softmax_kernel": 7,
}
"""Kernels of vLLM's runner except top-k and top-p, with the number of each that an engine on an H100 compiled."""


def worker(*, jit: bool = True, rank: int = 0, second: bool = True) -> Any:
    config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=jit))
    return SimpleNamespace(vllm_config=config, local_rank=rank, use_v2_model_runner=second)


def after(wanted: Path, made: Path) -> None:
    """Create `made` once `wanted` exists."""
    wait_until(wanted.exists)
    made.touch()


def stay(pid: Path) -> None:
    pid.write_text(str(os.getpid()))
    time.sleep(600)


def no_model(config: Any) -> None:
    raise ImportError("no such model")


def is_gone(pid: Path) -> bool:
    try:
        os.kill(int(pid.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(ahead, "has_cuda", lambda: False)
    monkeypatch.setattr(ahead, "_arch", lambda: Arch.SM_120)
    monkeypatch.setattr(ahead.plans, "compilers", lambda: 6)
    monkeypatch.setattr(ahead, "use_no_gpu", lambda arch: None)
    monkeypatch.setattr(ahead, "import_model", no_model)
    monkeypatch.setattr(ahead, "_IMPORT_SECONDS", 3.0)
    caplog.set_level(logging.INFO, "vllm.dsv4")
    yield
    if (running := ahead._AheadProcess.running) is not None:
        ahead._AheadProcess.running = None
        running.end()


class Compiles:
    """The calls of the runner and of the layers, as the compiling process finds them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner: list[Any] = []
        self.choice: list[Any] = []
        self.layers: list[Any] = []
        monkeypatch.setattr(ahead, "runner_calls", lambda config, count: self.runner)
        monkeypatch.setattr(ahead, "choice_calls", lambda config: self.choice)
        monkeypatch.setattr(ahead, "registered_calls", lambda registered: self.layers if registered else [])
        monkeypatch.setattr(ahead, "registered_kernels", lambda: [ahead.Registered("a", "b", b"")])


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Compiles:
    return Compiles(monkeypatch)


def test_both_sets_are_compiled_while_the_worker_goes_on(
    compiles: Compiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiles.runner = [functools.partial(after, tmp_path / "device", tmp_path / f"s{i}") for i in range(4)]
    compiles.layers = [functools.partial(after, tmp_path / "weights", tmp_path / f"l{i}") for i in range(2)]
    # The worker gets its device and its model without waiting; the compilations wait for them.
    ahead.before_device(lambda worker: (tmp_path / "device").touch())(worker())
    assert ahead.after_model(lambda **options: options)(prefix="a") == {"prefix": "a"}
    ahead.finish_runner()
    assert sorted(found.name for found in tmp_path.glob("s*")) == ["s0", "s1", "s2", "s3"]
    assert not list(tmp_path.glob("l*"))
    (tmp_path / "weights").touch()
    assert ahead.before_jit_warmup(lambda worker: "warm")(worker()) == "warm"
    assert sorted(found.name for found in tmp_path.glob("l*")) == ["l0", "l1"]
    first, second = caplog.messages
    assert first.startswith("dsv4 warm-up: 3 of 3 processes compiled the runner's launches beside the weights")
    assert second.startswith(
        "dsv4 warm-up: 2 of 2 processes compiled the layers' registered kernels beside the weights"
    )
    assert ahead._AheadProcess.running is None


def test_processes_that_fail_or_are_late_block_no_engine(
    compiles: Compiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pid = tmp_path / "pid"
    done = tmp_path / "done"
    monkeypatch.setattr(ahead, "_FINISH_SECONDS", 2.0)
    compiles.runner = [functools.partial(os._exit, 1), functools.partial(stay, pid), done.touch]
    ahead.begin(worker())
    wait_until(lambda: pid.exists() and pid.read_text() != "" and done.exists())
    begun = time.monotonic()
    ahead.finish()
    assert time.monotonic() - begun < 60
    (line,) = caplog.messages
    assert line.startswith("dsv4 warm-up: 1 of 3 processes compiled the runner's launches")
    wait_until(lambda: is_gone(pid))


def test_a_process_that_ends_is_one_warning_and_takes_its_own_with_it(
    compiles: Compiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pid = tmp_path / "pid"
    compiles.runner = [functools.partial(stay, pid)]
    ahead.begin(worker())
    assert ahead._AheadProcess.running is not None
    wait_until(lambda: pid.exists() and pid.read_text() != "")
    os.kill(ahead._AheadProcess.running.pid, 9)
    ahead.after_model(lambda: None)()
    ahead.finish()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("dsv4 warm-up: vLLM compiles the runner's launches itself: ")
    wait_until(lambda: is_gone(pid))


def test_a_vllm_with_another_runner_has_the_other_kernels_compiled(
    compiles: Compiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(config: Any, count: int) -> Any:
        raise ImportError("no such kernels")

    monkeypatch.setattr(ahead, "runner_calls", gone)
    compiles.choice = [(tmp_path / "choice").touch]
    compiles.layers = [lambda: None]
    ahead.begin(worker())
    ahead.after_model(lambda: None)()
    ahead.finish()
    expected = "dsv4 warm-up: vLLM compiles some of the runner's launches itself: ImportError: no such kernels"
    assert caplog.messages[0] == expected
    assert caplog.messages[1].startswith("dsv4 warm-up: 1 of 1 processes compiled the runner's launches")
    assert (tmp_path / "choice").exists()
    assert caplog.messages[2].startswith("dsv4 warm-up: 1 of 1 processes compiled the layers' registered kernels")


def test_the_first_model_that_registers_kernels_counts(
    compiles: Compiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiles.layers = [(tmp_path / "layer").touch]
    ahead.begin(worker())
    for registered in ([], [ahead.Registered("a", "b", b"")]):
        monkeypatch.setattr(ahead, "registered_kernels", functools.partial(list, registered))
        ahead.after_model(lambda: None)()
    ahead.finish()
    assert (tmp_path / "layer").exists()


def test_a_model_whose_kernels_cannot_be_determined_is_returned(
    compiles: Compiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other() -> Any:
        raise AttributeError("no registry")

    monkeypatch.setattr(ahead, "registered_kernels", other)
    ahead.begin(worker())
    assert ahead.after_model(lambda: "model")() == "model"
    ahead.finish()
    expected = "dsv4 warm-up: vLLM compiles the layers' registered kernels itself: AttributeError: no registry"
    assert caplog.messages == [expected]


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
    assert ahead._AheadProcess.running is None
    assert ahead.after_model(lambda: "model")() == "model"
    ahead.finish()


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

    # The process of a failed call ends with an error, which is counted.
    with pytest.raises(RuntimeError, match="2 of 4 calls failed"):
        ahead.compile_all([fail, lambda: done.append(1), fail, lambda: done.append(2)])
    assert done == [1, 2]


def test_vllms_own_warm_up_compiles_nothing_after_them(tmp_path: Path) -> None:
    """Kernels of the installed vLLM, without a GPU: its own warm-up finds all of them in Triton's cache."""
    script = Path(__file__).with_name("compile_ahead_with_vllm.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "VLLM_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    compiled, again = first["cubins"], second["cubins"]
    assert first["compiled"] == 0, "other processes compile"
    assert "2 of 2 processes compiled the runner's launches" in first["messages"][0]
    assert "2 of 2 processes compiled the layers' registered kernels" in first["messages"][1]
    assert second["compiled"] == 0, "vLLM's own warm-up compiles nothing"
    assert second["found"] > 6
    assert again == compiled
    assert {name: compiled[name] for name in RUNNER} == RUNNER


@pytest.mark.parametrize("bundled", [False, True])
def test_the_bundled_kernels_process_imports_while_the_worker_takes_its_gpu(
    compiles: Compiles, monkeypatch: pytest.MonkeyPatch, bundled: bool
) -> None:
    begun: list[TargetGPU] = []
    monkeypatch.setattr(ahead, "possible", lambda op: bundled and op is Op.MOE)
    monkeypatch.setattr(ahead.plans, "begin", begun.append)
    ahead.begin(worker())
    assert begun == [TargetGPU(Arch.SM_120, 188)] * bundled
