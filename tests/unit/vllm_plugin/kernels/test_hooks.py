"""Hooks on modules that look like vLLM's: what is recognised is changed, all else is left alone and told."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dsv4_runtime.contract.kernels import ALL_BUNDLED, KernelChoice, Op
from dsv4_runtime.engine.logs import kernels
from dsv4_runtime.vllm_plugin.kernels import attachments, hooks, hyper, indexer

NAME = "dsv4_test_module"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, made)
    return made


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (attachments, indexer):
        monkeypatch.setattr(place, "choice", lambda: ALL_BUNDLED)


def refuse(module: ModuleType) -> None:
    raise hooks.HookMismatchError("it is another one")


def test_a_hook_without_operations_is_made_whatever_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setenv("DSV4_KERNELS", "off")
    monkeypatch.setattr(attachments, "after_import", lambda module, action: made.append(module))
    monkeypatch.setattr(
        attachments, "HOOKS", (hooks.Hook((Op.MOE,), "a", "f", None, refuse), hooks.Hook((), "b", "f", None, refuse))
    )
    attachments.install()
    assert made == ["b"]


@pytest.mark.parametrize(("ops", "prefix"), [((Op.MHC,), "dsv4 kernels: mhc stays"), ((), "dsv4 warm-up: stays")])
def test_a_hook_that_does_not_fit_is_one_line(
    module: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, ops: tuple[Op, ...], prefix: str
) -> None:
    monkeypatch.setattr(hooks, "vllm_version", lambda: "vLLM 0.33.0")
    module.f = lambda: None
    with caplog.at_level(logging.WARNING, "vllm.dsv4"):
        hooks.run(hooks.Hook(ops, NAME, "f", (), refuse))
    (record,) = caplog.records
    assert record.getMessage().startswith(prefix)
    assert "it is another one" in record.getMessage()


@pytest.mark.usefixtures("bundled")
def test_the_indexer_is_made_without_deep_gemm_where_its_scores_are_bundled(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer._State, "attached", False)
    asked = indexer.scores_are_there(lambda: False)
    assert not asked(), "nothing computes the scores yet"
    module.has_deep_gemm = lambda: False
    module.fp8_fp4_mqa_logits = module.fp8_fp4_paged_mqa_logits = lambda: None
    attachments._indexer_scores(module)
    assert module.has_deep_gemm()
    assert asked()


def test_the_indexer_needs_deep_gemm_where_its_scores_are_not_bundled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer._State, "attached", True)
    monkeypatch.setattr(indexer, "choice", lambda: KernelChoice({}))
    assert not indexer.scores_are_there(lambda: False)()
    assert indexer.scores_are_there(lambda: True)()


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
    names = dict.fromkeys(hyper.FUNCTIONS, "TileLang's")
    vars(model).update(names)
    monkeypatch.setattr(hyper, "announce_plans", lambda hidden: None)
    monkeypatch.setitem(sys.modules, attachments._TILELANG, ModuleType(attachments._TILELANG))
    attachments._mhc(model)
    mtp = SimpleNamespace(mhc_post_tilelang="TileLang's", hc_head_fused_kernel_tilelang="TileLang's", other=1)
    monkeypatch.setitem(sys.modules, f"{package}.mtp", mtp)  # type: ignore[arg-type]
    Layer()
    assert {name: getattr(model, name) for name in names} == dict(hyper.FUNCTIONS)
    assert vars(mtp) == {
        "mhc_post_tilelang": hyper.mhc_post,
        "hc_head_fused_kernel_tilelang": hyper.hc_head,
        "other": 1,
    }


def test_the_agent_takes_no_line_of_the_sampler_for_an_operation() -> None:
    assert (
        kernels("dsv4 warm-up: stays as vLLM has it (vllm.v1.worker.gpu_worker.kernel_warmup of vLLM 1: gone)") is None
    )


def test_a_preparation_of_drafts_with_other_parameters_is_left_alone(
    module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (hook,) = (one for one in attachments.HOOKS if one.symbol == "prepare_dflash_inputs")
    module.prepare_dflash_inputs = theirs = lambda input_batch, num_query_per_req: None
    with caplog.at_level(logging.WARNING, "vllm.dsv4"):
        hooks.run(replace(hook, module=NAME))
    assert module.prepare_dflash_inputs is theirs
    assert "it has no parameter block_table" in caplog.text
