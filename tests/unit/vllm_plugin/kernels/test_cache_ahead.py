"""Plans of attention that are announced before a KV cache exists."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_kernels import arch
from dsv4_kernels.arch import Arch, TargetGPU
from dsv4_kernels.fp8.api import QuantPlan
from dsv4_runtime.nano.recipe import Precision, model_config, recipe_for
from dsv4_runtime.vllm_plugin.kernels import plans, warmup
from dsv4_runtime.vllm_plugin.kernels.plans import DEVICE, announce, announced_plan, begin_anew, finish
from dsv4_testkit.vllm_script import SECONDS, told_by_fork

SCRIPT = Path(__file__).with_name("cache_ahead_with_vllm.py")


def test_the_caches_that_are_foreseen_lie_as_vllms_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config(recipe_for(Precision.BF16))))
    told = told_by_fork(SCRIPT, NANO_MODEL=str(tmp_path))
    assert told["foreseen"] == told["real"]
    assert len(told["real"]) == 14
    assert told["bytes"] > 1 << 27, "vLLM's own have memory"
    assert told["devices"] == ["meta"]
    # The layers have these caches temporarily, and vLLM resolves the layout of its own independently.
    assert told["inside"]["model.layers.1.attn"] == [64, 584]
    assert told["kept"] is True
    assert (told["resolved"], told["layout"]) == (None, "BLHNC")


class Layer:
    """Attention whose plan depends on its cache's stride."""

    def __init__(self) -> None:
        self.kv_cache = torch.tensor([])

    def bind_kv_cache(self, cache: torch.Tensor) -> None:
        self.kv_cache = cache

    def plan_decode_ahead(self) -> None:
        width, device = self.kv_cache.stride(0), self.kv_cache.device
        announced_plan(("decode", width, device), QuantPlan, 64, width, device)


class Model:
    """A model with one such layer."""

    def __init__(self) -> None:
        self.layer = Layer()

    def modules(self) -> list[Any]:
        return [self, self.layer]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(plans, "gpu_target", lambda: TargetGPU(Arch.SM_121, 48))
    monkeypatch.setattr(warmup, "gpu_target", lambda: TargetGPU(Arch.SM_121, 48))
    monkeypatch.setattr(arch, "_TARGETS", {})
    monkeypatch.setattr(plans, "_PLANS", {})
    monkeypatch.setattr(warmup, "_MODELS", [])
    # The processes that compile have the lowest priority beside other tests.
    monkeypatch.setattr(plans, "_FINISH_SECONDS", SECONDS)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    for module in (plans, warmup):
        monkeypatch.setattr(module, "LOGGER", logging.getLogger(__name__))
    caplog.set_level(logging.INFO, __name__)
    yield
    finish(0.0)


def configuration(*models: Model, drafts: object = None) -> Any:
    context = {f"layer{number}": one.layer for number, one in enumerate(models)}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        speculative_config=None if drafts is None else SimpleNamespace(draft_model_config=drafts),
    )


def foresee(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Let vLLM plan caches with rows of `width` bytes."""

    def caches(config: Any) -> dict[str, torch.Tensor]:
        names = config.compilation_config.static_forward_context
        return {name: torch.empty((1, width), dtype=torch.uint8, device="meta") for name in names}

    monkeypatch.setattr(warmup, "foreseen_caches", caches)


def test_attention_plans_are_compiled_with_the_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    foresee(monkeypatch, 256)
    model = Model()
    empty = model.layer.kv_cache
    announce(QuantPlan, 64, 128, DEVICE)
    loaded = warmup.announcing_attention(lambda vllm_config, prefix="": model)(vllm_config=configuration(model))
    assert loaded is model
    assert plans._PLANS == {}, "plans without memory are not kept"
    assert model.layer.kv_cache is empty
    # The profile only waits for the first one; the process continues with the other.
    begin_anew()
    running = plans._Compiler.running
    assert running is not None
    assert (len(running.announced), len(running.later)) == (2, 1)
    # The layer's own plan, with the real cache, requires no new compilation.
    model.layer.bind_kv_cache(torch.empty((3, 256), dtype=torch.uint8))
    model.layer.plan_decode_ahead()
    assert len(plans._PLANS) == 1
    assert len(running.announced) == 2
    finish(SECONDS)
    waited, compiled = (record.getMessage() for record in caplog.records)
    assert waited.startswith("dsv4 kernels: waited ")
    assert waited.endswith(" s for 1 announced plans")
    assert "2 of 2 announced plans were compiled" in compiled
    # At the next start both are present.
    warmup.announcing_attention(lambda vllm_config: model)(configuration(model))
    assert plans._Compiler.running is None


def test_layers_that_draft_share_the_caches_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    foresee(monkeypatch, 256)
    target, drafting, drafts = Model(), Model(), object()
    config = configuration(target, drafting, drafts=drafts)
    made: list[list[Any]] = []
    monkeypatch.setattr(warmup, "announce_attention", lambda models, _: made.append(list(models)))
    load = warmup.announcing_attention(lambda vllm_config, prefix="", model_config=None: made_of[id(model_config)])
    made_of = {id(None): target, id(drafts): drafting}
    load(vllm_config=config, model_config=None)
    assert made == []
    load(vllm_config=config, model_config=drafts)
    assert made == [[target, drafting]]


def test_an_incompatible_vllm_is_reported_once_and_loads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def caches(config: Any) -> dict[str, torch.Tensor]:
        raise ImportError("no allocate_kv_cache")

    monkeypatch.setattr(warmup, "foreseen_caches", caches)
    model = Model()
    assert warmup.announcing_attention(lambda vllm_config: model)(configuration(model)) is model
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == ("dsv4 kernels: attention is compiled once there is a KV cache (ImportError: no allocate_kv_cache)")


def test_without_a_gpu_nothing_is_planned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(warmup, "gpu_target", lambda: None)
    warmup.announcing_attention(lambda vllm_config: Model())(configuration())
    assert caplog.records == []
