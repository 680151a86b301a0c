"""The fault injection plugin of the kit: orders are for one rank, executed once, and the plugin is off by default."""

import json
import os
import subprocess
import sys
import threading
import time
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_faults
from dsv4_faults import defects
from dsv4_runtime.vllm_plugin import patch

# Runs in a separate process: the import of vLLM's worker takes seconds, and the plugin changes it permanently.
WITH_VLLM = """
import json, os
from types import SimpleNamespace
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.cpu_worker import CPUWorker
said = ""
if "DSV4_FAULT_FILE" in os.environ:
    try:
        CPUWorker.execute_model(SimpleNamespace(rank=1), None)
    except Exception as error:
        said = type(error).__name__
print(json.dumps([CPUWorker.execute_model is Worker.execute_model, said]))
"""
WORKER = "vllm.v1.worker.gpu_worker"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "order"


def write(file: Path, **order: Any) -> None:
    file.write_text(json.dumps(order))


def test_the_installed_plugin_is_that_of_this_checkout():
    """vLLM's processes load the installed wheel; `make setup` updates it."""
    found = distribution("dsv4-faults")
    (point,) = found.entry_points.select(group="vllm.general_plugins")
    assert (point.name, point.value) == ("dsv4_faults", "dsv4_faults:register")
    own = Path(dsv4_faults.__file__).parent
    for name in ("__init__.py", "defects.py", "illegal_address.py"):
        assert found.read_text(f"../dsv4_faults/{name}") == (own / name).read_text(), "run: make setup"


def test_without_a_file_there_is_no_order(file: Path):
    assert dsv4_faults.take(file, 0, None) is None


def test_an_order_for_another_rank_stays(file: Path):
    write(file, kind="raise", rank=1)
    assert dsv4_faults.take(file, 0, None) is None
    assert file.exists()


def test_an_order_is_taken_once(file: Path):
    write(file, kind="hang", rank=1, seconds=2.0)
    assert dsv4_faults.take(file, 1, None) == {"kind": "hang", "rank": 1, "seconds": 2.0}
    assert dsv4_faults.take(file, 1, None) is None


def test_a_file_that_holds_no_order_is_an_error(file: Path):
    file.write_text("{")
    with pytest.raises(ValueError, match="Expecting property name"):
        dsv4_faults.take(file, 0, None)


def test_an_order_for_a_prompt_stays_and_is_executed_at_every_start_of_the_prompt(file: Path):
    def step(*prompts: list[int]) -> SimpleNamespace:
        return SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(prompt_token_ids=prompt) for prompt in prompts])

    order = {"kind": "raise", "rank": 0, "prompt": [1, 2]}
    write(file, **order)
    assert dsv4_faults.take(file, 0, step()) is None
    assert dsv4_faults.take(file, 0, step([1, 2, 3], [2, 1])) is None
    assert dsv4_faults.take(file, 1, step([1, 2])) is None
    for _ in range(2):
        assert dsv4_faults.take(file, 0, step([5], [1, 2])) == order


def test_an_order_for_structured_output_stays_and_is_executed_in_its_steps(file: Path):
    order = {"kind": "raise", "rank": 0, "structured": True}
    write(file, **order)
    for structured in (False, True, True):
        step = SimpleNamespace(has_structured_output_requests=structured)
        assert dsv4_faults.take(file, 0, step) == (order if structured else None)


def test_raise_raises():
    with pytest.raises(dsv4_faults.InjectedError):
        dsv4_faults.obey({"kind": "raise", "rank": 0}, None)


@pytest.mark.parametrize(("kind", "slept"), [("hang", [0.3]), ("spin", [])])
def test_a_hang_sleeps_and_work_does_not(kind: str, slept: list[float], monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    sleep = time.sleep
    test = threading.get_ident()

    def recorded(seconds: float) -> None:
        if threading.get_ident() == test:  # threads of earlier tests may still sleep
            pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", recorded)
    begun = time.monotonic()
    dsv4_faults.obey({"kind": kind, "rank": 0, "seconds": 0.3}, None)
    assert time.monotonic() - begun >= 0.3
    assert pauses == slept


def test_logits_are_no_numbers_from_then_on():
    model = SimpleNamespace(compute_logits=lambda hidden, bias: hidden + bias)
    dsv4_faults.obey({"kind": "nan", "rank": 0}, SimpleNamespace(model_runner=SimpleNamespace(model=model)))
    for _ in range(2):
        found = model.compute_logits(1.0, 2.0)
        assert found != found


class Runner:
    """The parts of vLLM's model runner that defects change; `hidden` are the logits."""

    def __init__(self) -> None:
        self.model = self.sampler = self.block_tables = self
        prompts = torch.tensor([[7, 5], [7, 8]])
        lengths = SimpleNamespace(np=prompts.new_full((2,), 2).numpy())
        self.req_states = SimpleNamespace(prompt_len=lengths, all_token_ids=SimpleNamespace(gpu=prompts))
        self.w13_weight, self.w2_weight = torch.arange(4.0)[:, None], torch.arange(4.0)[:, None] * 2

    def named_modules(self) -> list[tuple[str, Any]]:
        return [("model.layers.1.attn", object()), ("model.layers.1.ffn.experts", self)]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def compute_slot_mappings(self, idx_mapping, query_start_loc, positions, num_tokens_padded, out=None):
        return torch.arange(num_tokens_padded).repeat(2, 1)

    def sample(
        self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos,
        seq_lens_upper_bound_np, return_logprobs=False,
    ):  # fmt: skip
        return logits.argmax(-1), logits

    def outcome(self) -> list[list[float]]:
        """Return logits, weights, slots and sampled tokens."""
        pos, logits = torch.tensor([1, 2]), torch.eye(2)
        sampled, _ = self.sampler.sample(
            logits, torch.tensor([0, 1]), None, None, pos, torch.tensor([5, 8]), None, None
        )
        slots = self.block_tables.compute_slot_mappings(None, None, torch.arange(3), 4)
        parts = (self.model.compute_logits(torch.ones(2)), self.w13_weight, self.w2_weight, slots[1], sampled)
        return [[round(value, 3) for value in part.flatten().tolist()] for part in parts]


SOUND = [[1.0, 1.0], [0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 4.0, 6.0], [0, 1, 2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("order", "changed"),
    [
        ({"kind": "logits", "scale": 1.01}, {0: [1.01, 1.01]}),
        ({"kind": "logits", "spread": 0.01}, {0: [1.015, 0.997]}),
        ({"kind": "expert", "layer": 1, "experts": [[0, 3]]}, {1: [3.0, 1.0, 2.0, 0.0], 2: [6.0, 2.0, 4.0, 0.0]}),
        ({"kind": "page", "first": 1, "last": 3}, {3: [0, -1, -1, 3]}),
        ({"kind": "repeat", "every": 2}, {4: [0, 8]}),
        ({"kind": "script", "think": 5, "reasoned": [20, 21], "answer": [30, 31]}, {4: [20, 31]}),
        ({"kind": "stop"}, {}),
    ],
    ids=lambda value: value.get("kind", ""),
)
def test_a_defect_lasts_as_long_as_its_order(file: Path, order: dict[str, Any], changed: dict[int, list[float]]):
    worker = SimpleNamespace(model_runner=Runner())
    wanted = [changed.get(number, part) for number, part in enumerate(SOUND)]
    for _ in range(2):
        defects.switch(worker, file)
        assert worker.model_runner.outcome() == SOUND
        write(file, **order)
        assert dsv4_faults.take(file, 0, None) is None
        for _ in range(2):
            defects.switch(worker, file)
            assert worker.model_runner.outcome() == wanted
        file.unlink()


def test_one_defect_replaces_another_one(file: Path):
    worker = SimpleNamespace(model_runner=Runner())
    for scale in (2.0, 3.0):
        write(file, kind="logits", scale=scale)
        defects.switch(worker, file)
        assert worker.model_runner.outcome()[0] == [scale, scale]


def test_unlimited_memory_is_an_error():
    with pytest.raises(MemoryError, match="2 chunks"):
        dsv4_faults.obey({"kind": "eat", "rank": 0, "mebibytes": 32}, None)


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="DSV4_FAULT_FILE: unknown kind 'melt'"):
        dsv4_faults.obey({"kind": "melt", "rank": 0}, None)


@pytest.mark.parametrize(
    ("file_set", "development"), [(False, True), (True, False)], ids=["no file", "no development platform"]
)
def test_fault_injection_is_off_by_default(
    file: Path, monkeypatch: pytest.MonkeyPatch, file_set: bool, development: bool
):
    monkeypatch.delenv(dsv4_faults.FILE_VARIABLE, raising=False)
    monkeypatch.delenv("DSV4_DEV_PLATFORM", raising=False)
    monkeypatch.setitem(patch._FINDER.waiting, WORKER, [])
    if file_set:
        monkeypatch.setenv(dsv4_faults.FILE_VARIABLE, str(file))
    if development:
        monkeypatch.setenv("DSV4_DEV_PLATFORM", "1")
    dsv4_faults.register.__wrapped__()
    assert patch._FINDER.waiting[WORKER] == []


def test_faults_are_injected_on_cuda_if_enabled(file: Path, monkeypatch: pytest.MonkeyPatch):
    class Worker:
        rank = 0

        def execute_model(self, scheduler_output: Any) -> str:
            return "computed"

    monkeypatch.setattr(dsv4_faults, "is_cpu_build", lambda: False)
    monkeypatch.setattr(patch._FINDER, "waiting", {})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    for name in ("vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=Worker))
    monkeypatch.setenv(dsv4_faults.FILE_VARIABLE, str(file))
    dsv4_faults.register.__wrapped__()
    worker = Worker()
    assert worker.execute_model(None) == "computed"
    write(file, kind="pace", rank=0, seconds=0.05)
    for _ in range(2):
        begun = time.monotonic()
        assert worker.execute_model(None) == "computed"
        assert time.monotonic() - begun >= 0.05
    write(file, kind="raise", rank=0)
    with pytest.raises(dsv4_faults.InjectedError):
        worker.execute_model(None)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(True, [True, "InjectedError"]), (False, [True, ""])],
    ids=["asked", "not asked"],
)
def test_faults_are_injected_into_vllms_worker_only_if_enabled(file: Path, asked: bool, expected: list[Any]):
    env = {key: value for key, value in os.environ.items() if key != dsv4_faults.FILE_VARIABLE}
    env |= {"DSV4_DEV_PLATFORM": "1", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if asked:
        write(file, kind="raise", rank=1)
        env[dsv4_faults.FILE_VARIABLE] = str(file)
    done = subprocess.run(
        [sys.executable, "-c", WITH_VLLM], env=env, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
