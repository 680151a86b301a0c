"""Hooks on modules similar to vLLM's, and on vLLM's own: an operation has all of its hooks or none."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dsv4_runtime.contract.kernels import ALL_BUNDLED, BUNDLED, STOCK, KernelChoice, Op
from dsv4_runtime.engine.logs import kernels
from dsv4_runtime.vllm_plugin.kernels import choice, hooks, indexer, sublayers, v033, vllm_api
from dsv4_runtime.vllm_plugin.kernels.hooks import Assignment, Attached, Hook, Known
from dsv4_testkit.vllm_script import told_by

NAME = "dsv4_test_module"
OTHER = "dsv4_test_module_2"
(SCORES,) = (one for one in v033.HOOKS if "indexer:scores_are_there" in one.wrap.values())
FUNCTIONS = {name: hooks.load(reference) for name, reference in v033.HYPER_CONNECTIONS.items()}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, made)
    return made


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(OTHER)
    monkeypatch.setitem(sys.modules, OTHER, made)
    return made


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (sublayers, indexer):
        monkeypatch.setattr(place, "choice", lambda: ALL_BUNDLED)


def nothing(module: ModuleType) -> list[Assignment]:
    return []


def wrapping(name: str, with_what: str) -> Any:
    """Return a preparation that wraps the function `name`: it then returns `with_what` and the original's result."""

    def prepare(module: ModuleType) -> list[Assignment]:
        original = getattr(module, name)
        return [(module, name, lambda: f"{with_what}({original()})")]

    return prepare


def test_a_hook_of_the_warm_up_is_installed_for_every_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(choice, "ATTACHED", SimpleNamespace(install=lambda hook: made.append(hook.module)))
    known = (Hook((Op.MOE,), "a", {}, nothing), Hook((), "b", {}, nothing), Hook((), "c", {}, nothing, bundled=True))
    monkeypatch.setattr(vllm_api, "adapter", lambda: SimpleNamespace(HOOKS=known))
    for text, expected in (("off", ["b"]), ("auto", ["a", "b", "c"]), ("moe=stock,mhc=bundled", ["b", "c"])):
        made.clear()
        every = dict.fromkeys(Op, STOCK)
        monkeypatch.setenv("DSV4_KERNELS", text if "=" not in text else str(KernelChoice(every | {Op.MHC: BUNDLED})))
        choice.install()
        assert made == expected, text


ERRORS = (
    KeyError("PlatformEnum.CUDA"), TypeError("t"), ValueError("v"), RuntimeError("r"), AttributeError("a"),
    ImportError("i"), AssertionError(), RecursionError(),
)  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("ops", "prefix"), [((Op.MHC,), "dsv4 kernels: mhc stays"), ((), "dsv4 warm-up: stays")])
def test_any_exception_of_a_preparation_is_one_line_and_changes_nothing(
    module: Any, caplog: pytest.LogCaptureFixture, ops: tuple[Op, ...], prefix: str, error: Exception
) -> None:
    def prepare(module: ModuleType) -> list[Assignment]:
        raise error

    module.f = lambda: None
    before, attached = dict(vars(module)), Attached()
    with caplog.at_level(logging.WARNING, "vllm.dsv4"):
        attached.run(Hook(ops, NAME, {"f": ()}, prepare))
    (record,) = caplog.records
    assert record.getMessage().startswith(prefix)
    assert type(error).__name__ in record.getMessage()
    assert vars(module) == before
    assert attached.agreed(ALL_BUNDLED).bundled(Op.MHC) is not bool(ops)


def test_a_failed_assignment_reverts_the_previous_ones(module: Any) -> None:
    module.f = theirs = lambda: None
    with pytest.raises(TypeError):
        hooks.apply([(module, "f", 1), (module, "new", 2), (int, "real", 3)])
    assert module.f is theirs
    assert not hasattr(module, "new")


def test_an_operation_is_in_force_only_with_all_of_its_hooks(
    module: Any, other: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Hooks that were attached before are undone; hooks of other operations on the same symbols remain."""
    module.f = lambda: "stock"
    attached = Attached()
    first = Hook((Op.MOE,), NAME, {"f": ()}, wrapping("f", "moe"))
    second = Hook((Op.ROUTER,), NAME, {"f": ()}, wrapping("f", "router"))
    third = Hook((), NAME, {"f": ()}, wrapping("f", "warm"))
    both = Hook((Op.MOE, Op.FRONT), NAME, {"f": ()}, wrapping("f", "both"))
    for hook in (first, second, third, both):
        attached.run(hook)
    assert module.f() == "both(warm(router(moe(stock))))"
    with caplog.at_level(logging.WARNING, "vllm.dsv4"):
        attached.run(Hook((Op.MOE,), OTHER, {"gone": None}, nothing))
    assert module.f() == "both(warm(router(stock)))"
    (record,) = caplog.records
    assert "dsv4 kernels: moe stays with vLLM's own kernels" in record.getMessage()
    assert "gone is gone" in record.getMessage()
    agreed = attached.agreed(ALL_BUNDLED)
    assert {op for op in Op if not agreed.bundled(op)} == {Op.MOE}
    attached.run(first)
    assert module.f() == "both(warm(router(stock)))", "an operation that was refused stays so"


def test_a_module_that_vllm_has_not_imported_is_imported_when_the_choice_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "dsv4_late_module.py").write_text("def f():\n    return 'stock'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    attached = Attached()
    attached.install(Hook((Op.MOE,), "dsv4_late_module", {"f": ()}, wrapping("f", "moe")))
    attached.install(Hook((Op.MHC,), "dsv4_absent_module", {"f": ()}, nothing))
    only = KernelChoice({Op.MOE: BUNDLED, Op.MHC: BUNDLED})
    assert attached.agreed(KernelChoice({})) == KernelChoice({})
    assert "dsv4_late_module" not in sys.modules
    assert attached.agreed(only) == KernelChoice({Op.MOE: BUNDLED})
    assert sys.modules["dsv4_late_module"].f() == "moe(stock)"
    sys.modules.pop("dsv4_late_module")


def test_only_known_function_bodies_are_replaced() -> None:
    def same(self: Any, x: Any) -> Any:
        gate_up, _ = self.gate_up_proj(x)
        x = self.act_fn(gate_up)
        x, _ = self.down_proj(x)
        return x

    def scaled(self: Any, x: Any) -> Any:
        gate_up, _ = self.gate_up_proj(x)
        x = self.act_fn(gate_up) * 2
        x, _ = self.down_proj(x)
        return x

    hook = Hook((Op.MOE,), NAME, {"f": Known(body=v033._known_mlp)}, nothing)
    assert hooks.prepared(hook, SimpleNamespace(f=same)) == []  # type: ignore[arg-type]
    with pytest.raises(hooks.HookMismatchError, match="f has another body"):
        hooks.prepared(hook, SimpleNamespace(f=scaled))  # type: ignore[arg-type]


def test_methods_that_are_replaced_must_have_the_parameters_of_their_replacements() -> None:
    class Base:
        def apply(self, x: int, *, y: int) -> None: ...

        def room(self, m: int, n: int, more: int) -> None: ...

    class Own(Base):
        def apply(self, x: int, *, y: int) -> None: ...

        def room(self, m: int, *_: int) -> None: ...

    hooks.check_overrides(Own, Base, ("apply", "room"))

    class Changed:
        def apply(self, x: int, *, z: int) -> None: ...

        def room(self, k: int, n: int) -> None: ...

    for name in ("apply", "room"):
        with pytest.raises(hooks.HookMismatchError, match=f"Changed.{name}"):
            hooks.check_overrides(Own, Changed, (name,))
    with pytest.raises(hooks.HookMismatchError, match="other is gone"):
        hooks.check_overrides(Own, Base, ("other",))


@pytest.fixture(scope="module")
def mutated() -> dict[str, Any]:
    return told_by(Path(__file__).with_name("mutating_with_vllm.py"), DSV4_KERNELS="auto")


def test_the_hooks_fit_the_installed_vllm(mutated: dict[str, Any]) -> None:
    """The scores of the indexer and the operations after them are supported since vLLM 0.33."""
    assert set(mutated["refused"]) <= {"indexer", "topk"}
    assert mutated["hooks"] == len(v033.HOOKS)


def test_a_symbol_that_is_gone_or_another_one_leaves_its_module_as_it_was(mutated: dict[str, Any]) -> None:
    """Every symbol of every hook is deleted, renamed, given another parameter, or no function; the import succeeds."""
    assert mutated["mutations"] > 100
    assert mutated["changed"] == []
    assert mutated["silent"] == []


@pytest.mark.usefixtures("bundled")
def test_the_indexer_is_made_without_deep_gemm_where_its_scores_are_bundled(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.has_deep_gemm = lambda: False
    module.fp8_fp4_mqa_logits = module.fp8_fp4_paged_mqa_logits = lambda: None
    hooks.apply(hooks.assignments(SCORES, module))
    assert module.has_deep_gemm()
    monkeypatch.setattr(indexer, "choice", lambda: KernelChoice({}))
    assert not module.has_deep_gemm(), "vLLM's own scores need it"


def test_the_indexer_needs_deep_gemm_where_its_scores_are_not_bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "choice", lambda: KernelChoice({}))
    assert not indexer.scores_are_there(lambda: False)()
    assert indexer.scores_are_there(lambda: True)()


def test_an_indexer_with_other_scores_keeps_its_schedule(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One function of the scores has another name: neither the paged scores nor the schedule are replaced."""
    attached = Attached()
    monkeypatch.setattr(indexer, "choice", lambda: attached.agreed(ALL_BUNDLED))
    schedule = indexer.no_schedule(lambda *_, **__: "schedule")
    module.has_deep_gemm = lambda: False
    module.fp8_fp4_paged_mqa_logits = theirs = lambda *_: "paged"
    attached.run(replace(SCORES, module=NAME))
    assert module.fp8_fp4_paged_mqa_logits is theirs
    assert not module.has_deep_gemm()
    assert not indexer.in_force()
    assert schedule(None, 64, 132) == "schedule"


@pytest.mark.usefixtures("bundled")
def test_a_draft_model_that_is_imported_later_gets_the_hyper_connections_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        hidden_size = 128

        def __init__(self) -> None:
            pass

    package = f"{NAME}_package"
    model = ModuleType(f"{package}.model")
    model.__package__ = package
    model.DeepseekV4DecoderLayer = Layer  # type: ignore[attr-defined]
    # Functions with the parameters of TileLang's.
    vars(model).update(FUNCTIONS)
    monkeypatch.setattr(sublayers, "announce_plans", lambda hidden: None)
    monkeypatch.setitem(sys.modules, v033.TILELANG_HYPER_CONNECTIONS, ModuleType("tilelang_kernels"))
    hooks.apply(sublayers.hyper_connections(model))
    vars(model).update(dict.fromkeys(FUNCTIONS, "TileLang's"))
    mtp = SimpleNamespace(mhc_post_tilelang="TileLang's", hc_head_fused_kernel_tilelang="TileLang's", other=1)
    monkeypatch.setitem(sys.modules, f"{package}.mtp", mtp)  # type: ignore[arg-type]
    Layer()
    assert {name: getattr(model, name) for name in FUNCTIONS} == dict(FUNCTIONS)
    assert vars(mtp) == {
        "mhc_post_tilelang": sublayers.mhc_post,
        "hc_head_fused_kernel_tilelang": sublayers.hc_head,
        "other": 1,
    }


def test_the_agent_takes_no_line_of_the_sampler_for_an_operation() -> None:
    assert (
        kernels("dsv4 warm-up: stays as vLLM has it (vllm.v1.worker.gpu_worker.kernel_warmup of vLLM 1: gone)") is None
    )


def test_a_preparation_of_drafts_with_other_parameters_is_left_alone(
    module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (hook,) = (one for one in v033.HOOKS if "prepare_dflash_inputs" in one.symbols)
    module.prepare_dflash_inputs = theirs = lambda input_batch, num_query_per_req: None
    with caplog.at_level(logging.WARNING, "vllm.dsv4"):
        Attached().run(replace(hook, module=NAME))
    assert module.prepare_dflash_inputs is theirs
    assert "prepare_dflash_inputs has no parameter block_table" in caplog.text
