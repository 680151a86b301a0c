"""Plans that are compiled in parallel before the engine serves."""

from __future__ import annotations

import json
import logging
import multiprocessing
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_runtime.vllm_plugin.kernels import plans, vllm_api, warmup
from dsv4_runtime.vllm_plugin.kernels.trial import DIRECTORY


@dataclass
class Plan:
    """A plan whose warm-up ends once as many plans are in theirs as `beside` has parties."""

    beside: threading.Barrier
    fault: Exception | None = None
    warmed: list[bool] = field(default_factory=list)

    def warmup(self) -> None:
        self.beside.wait(timeout=60)
        if self.fault is not None:
            raise self.fault
        self.warmed.append(torch.is_inference_mode_enabled())


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_PLANS", {})
    monkeypatch.setattr(plans, "_WARMED", set())
    monkeypatch.setattr("os.cpu_count", lambda: 4)


def test_plans_are_compiled_at_the_same_time_each_once() -> None:
    beside = threading.Barrier(3)
    made = [plans.shared_plan(name, lambda: Plan(beside)) for name in "abc"]
    assert plans.warm_up() == 3
    assert plans.warm_up() == 0
    assert [plan.warmed for plan in made] == [[True]] * 3


def test_nothing_to_compile() -> None:
    assert plans.warm_up() == 0


def test_a_plan_that_cannot_be_compiled_is_an_error_and_is_tried_again() -> None:
    alone = threading.Barrier(1)
    plan = plans.shared_plan("a", lambda: Plan(alone, RuntimeError("out of shared memory")))
    with pytest.raises(RuntimeError, match="out of shared memory"):
        plans.warm_up()
    plan.fault = None
    assert plans.warm_up() == 1


def test_vllm_profiles_with_the_announced_kernels_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(warmup, "begin_anew", lambda: order.append("compiled"))

    def determine_available_memory(worker: str) -> int:
        order.append(f"profile of {worker}")
        return 7

    assert warmup.after_precompile(determine_available_memory)("rank 0") == 7
    assert order == ["compiled", "profile of rank 0"]


@dataclass
class Layer:
    """A layer of attention, or of a draft model, that records when it was planned."""

    order: list[str]
    name: str
    fault: Exception | None = None

    def plan_decode_ahead(self) -> None:
        if self.fault is not None:
            raise self.fault
        self.order.append(self.name)


def runner(*layers: object, drafts: object = None) -> SimpleNamespace:
    speculator = None if drafts is None else SimpleNamespace(model=SimpleNamespace(modules=lambda: [drafts]))
    return SimpleNamespace(
        model_runner=SimpleNamespace(model=SimpleNamespace(modules=lambda: [object(), *layers]), speculator=speculator)
    )


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    order: list[str] = []
    monkeypatch.setattr(warmup, "finish", lambda: order.append("compilers done"))
    monkeypatch.setattr(warmup, "warm_up", lambda: order.append("warm-up") or len(order))
    return order


def warm(worker: object, order: list[str]) -> str:
    attend = warmup.before_attention(lambda worker: order.append("attention"))

    def kernel_warmup(worker: object, process_local_only: bool = False) -> str:
        order.append("vLLM's")
        attend(worker)
        return "done"

    found: str = warmup.around_kernel_warmup(kernel_warmup)(worker)
    return found


def test_attention_is_compiled_while_vllm_compiles_its_own_kernels(order: list[str]) -> None:
    first, second, drafts = (Layer(order, name) for name in ("first", "second", "drafts"))
    assert warm(runner(first, second, drafts=drafts), order) == "done"
    assert order == [
        "first",
        "second",
        "drafts",
        "vLLM's",
        "compilers done",
        "warm-up",
        "attention",
        "compilers done",
        "warm-up",
    ]


def test_the_front_of_every_layer_with_a_window_is_planned_too(
    order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if attention is vLLM's own class."""
    stock = SimpleNamespace(swa_cache_layer=None, name="stock")
    monkeypatch.setattr(
        warmup.sublayers, "plan_ahead_of_requests", lambda layer: order.append(f"front of {layer.name}")
    )
    assert warm(runner(stock, Layer(order, "draft")), order) == "done"
    assert order == [
        "front of stock",
        "draft",
        "vLLM's",
        "compilers done",
        "warm-up",
        "attention",
        "compilers done",
        "warm-up",
    ]


def test_attention_that_cannot_be_planned_ahead_is_a_line_of_the_log(
    order: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.dsv4"):
        assert warm(runner(Layer(order, "odd", ValueError("no such page"))), order) == "done"
    assert order == ["vLLM's", "compilers done", "warm-up", "attention", "compilers done", "warm-up"]
    assert caplog.messages == ["dsv4 kernels: attention is planned late (ValueError: no such page)"]


class Graphs:
    """vLLM's manager of graphs."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def capture(self, model: str, *, has_lora: bool) -> None:
        self._order.append(f"{model}'s graphs")


@pytest.mark.parametrize("fails", [False, True])
def test_profiled_graphs_find_attention_compiled_in_the_memory_that_vllm_measures(
    order: list[str], fails: bool
) -> None:
    def capture_model(self: object, *, profile_only: bool = False) -> int:
        order.append("measure")
        made.cudagraph_manager.capture("model", has_lora=False)
        if fails:
            raise RuntimeError("out of memory")
        return 7

    made: SimpleNamespace = runner(Layer(order, "first"), drafts=Layer(order, "drafts")).model_runner
    made.cudagraph_manager = Graphs(order)
    capture = warmup.before_profiled_capture(capture_model)
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            capture(made, profile_only=True)
    else:
        assert capture(made, profile_only=True) == 7
    assert order == ["measure", "first", "drafts", "compilers done", "warm-up", "model's graphs"]
    assert not vars(made.cudagraph_manager).keys() - {"_order"}, "it is vLLM's own again"


def test_graphs_that_are_kept_are_vllms_alone(order: list[str]) -> None:
    made = SimpleNamespace(cudagraph_manager=Graphs(order))

    def capture_model(self: object, *, profile_only: bool = False) -> bool:
        made.cudagraph_manager.capture("model", has_lora=False)
        return profile_only

    assert warmup.before_profiled_capture(capture_model)(made) is False
    assert order == ["model's graphs"]


def test_vllm_compiles_the_shapes_of_called_gates_only() -> None:
    called, replaced = SimpleNamespace(shape=1), SimpleNamespace(shape=2, dsv4_replaced=True)
    model = SimpleNamespace(modules=lambda: iter([called, replaced]))
    shapes = warmup.of_called_gates(lambda model: tuple(module.shape for module in model.modules()))
    assert shapes(model) == (1,)


GRAPHS = 3 << 27
"""Bytes of the graphs of every estimate below."""


def model_runner(key: str = "a model", *, seqs: int = 8, sizes: tuple[int, ...] = (1, 2, 4)) -> SimpleNamespace:
    """Return a runner with the parts of the configuration that the key of an estimate has."""
    config = SimpleNamespace(
        model_config=key,
        scheduler_config=SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=2048),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=list(sizes), cudagraph_mode="FULL_AND_PIECEWISE"),
    )
    return SimpleNamespace(vllm_config=config)


def estimator(captures: list[Any]) -> Any:
    def profile_cudagraph_memory(runner: Any) -> int:
        captures.append(runner)
        return GRAPHS

    return warmup.reusing_graph_estimate(profile_cudagraph_memory)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let this process be the only rank of its engine; return the directory of the estimates, not yet made."""
    monkeypatch.setattr(warmup, "key_of", lambda config, model, prefix: model + prefix)
    # As an item: reading the attribute imports vLLM.
    monkeypatch.setitem(vars(vllm_api), "get_world_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "cache" / "kernels"))
    return tmp_path / "cache" / "kernels"


@pytest.mark.parametrize(
    ("later", "captures"),
    [
        (model_runner(), 1),
        (model_runner("another model"), 2),
        (model_runner(seqs=9), 2),
        (model_runner(sizes=(1, 2)), 2),
    ],
)
def test_graphs_are_estimated_once_for_each_configuration(
    one_rank: Path, later: SimpleNamespace, captures: int, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Any] = []
    with caplog.at_level(logging.INFO, logger="vllm.dsv4"):
        assert [estimator(made)(each) for each in (model_runner(), later)] == [GRAPHS, GRAPHS]
    assert len(made) == captures
    # The line of an estimate, which the memory plan is compared with.
    assert ("Estimated CUDA graph memory: 0.38 GiB" in caplog.text) == (captures == 1)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"bytes": "1"}', '{"bytes": -1}', '{"bytes": null}', "\0"])
def test_an_unreadable_estimate_is_made_again(one_rank: Path, text: str) -> None:
    made: list[Any] = []
    assert estimator(made)(model_runner()) == GRAPHS
    (file,) = one_rank.iterdir()
    file.write_text(text)
    assert estimator(made)(model_runner()) == GRAPHS
    assert len(made) == 2
    assert json.loads(file.read_text()) == {"bytes": GRAPHS}


def test_without_a_directory_or_a_key_graphs_are_estimated(
    one_rank: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Any] = []
    one_rank.mkdir(parents=True)
    file = one_rank.with_name("file")
    file.touch()
    monkeypatch.setenv(DIRECTORY, str(file))
    assert estimator(made)(model_runner()) == GRAPHS
    assert "cannot be kept" in caplog.text
    monkeypatch.delenv(DIRECTORY)
    assert estimator(made)(model_runner()) == GRAPHS
    monkeypatch.setenv(DIRECTORY, str(one_rank))
    assert estimator(made)(SimpleNamespace(vllm_config=SimpleNamespace(model_config="m"))) == GRAPHS
    assert "AttributeError" in caplog.text
    assert len(made) == 3
    assert not list(one_rank.iterdir())


def _rank(rank: int, folder: Path, keeps: bool, results: Any) -> None:
    """Estimate as one of two ranks, whose capture waits for the other one as a collective does."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    world, kept = SimpleNamespace(world_size=2, cpu_group=torch.distributed.group.WORLD), folder / str(rank)
    kept.mkdir()
    made: list[Any] = []

    def capture(runner: Any) -> int:
        torch.distributed.barrier()
        made.append(runner)
        return GRAPHS

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(vllm_api), "get_world_group", lambda: world)
        patch.setattr(warmup, "key_of", lambda *_: "a model")
        patch.setenv(DIRECTORY, str(kept))
        estimate = warmup.reusing_graph_estimate(capture)
        found = [estimate(model_runner())]
        if not keeps:
            next(kept.iterdir()).unlink()
        found += [estimate(model_runner()), estimate(model_runner())]
    results.put((found, len(made)))
    torch.distributed.destroy_process_group()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("keeps", [True, False])
def test_all_ranks_capture_or_none(tmp_path: Path, keeps: bool) -> None:
    """One whose file is lost would otherwise wait in the capture's collectives for ever."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, tmp_path, keeps or rank == 0, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        assert [results.get(timeout=60) for _ in ranks] == [([GRAPHS] * 3, 1 if keeps else 2)] * 2
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
