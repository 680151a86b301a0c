"""Plans that are compiled in parallel before the engine serves."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from dsv4_runtime.vllm_plugin.kernels import plans, warmup


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
