"""FP8 codes from the kernel that makes a layer's input to the products that use it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4_runtime.contract.kernels import KernelChoice
from dsv4_runtime.vllm_plugin.kernels import hooks, plans, sublayers

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_WANTED_CODES", {})
    monkeypatch.setattr(plans, "_PLANS", {})
    monkeypatch.setattr(sublayers, "announce", lambda *_: None)


class Plan:
    """A plan that computes nothing and has codes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options

    def run(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
        if "limit" in inputs:
            return inputs["out"]  # type: ignore[no-any-return]
        return torch.zeros(1), torch.zeros((3, 128))

    def codes(self, tokens: int) -> tuple[str, int]:
        return "codes of", tokens


def test_codes_are_requested_for_the_largest_row_count_of_any_product() -> None:
    assert plans.wanted_codes(256) == 0
    plans.want_codes(256, 32)
    plans.want_codes(256, 8)
    assert (plans.wanted_codes(256), plans.wanted_codes(128)) == (32, 0)


def test_a_tensor_without_codes_has_none_and_neither_has_a_part_of_one_that_has() -> None:
    x, found = torch.zeros((2, 128)), (torch.zeros((2, 128)), torch.zeros((2, 1)))
    assert plans.given_codes(plans.give_codes(x, None)) is None
    assert plans.given_codes(plans.give_codes(x, found)) is found
    assert plans.given_codes(x[:1]) is None


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_codes_get_through_a_custom_operator(mode: Callable[[], Any]) -> None:
    """The mixture of experts is such an operator, and its shared experts have an FP8 product."""
    library, seen = torch.library.Library(f"dsv4_test_{mode.__name__}", "FRAGMENT"), []

    def forward(x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        seen.append((plans.given_codes(x), y is not None and plans.given_codes(y)))
        return torch.empty_like(x)

    library.define("forward(Tensor x, Tensor? y) -> Tensor")
    library.impl("forward", forward, dispatch_key="CPU")
    with mode():
        x, found = torch.zeros((4, 128))[:2], (torch.zeros((2, 128)), torch.zeros((2, 1)))
        plans.give_codes(x, found)
        getattr(torch.ops, f"dsv4_test_{mode.__name__}").forward(x, x)
    assert seen == [(found, found)]


def test_the_input_of_a_sublayer_is_quantised_for_the_existing_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans.want_codes(128, 32)
    monkeypatch.setattr(sublayers, "PrePlan", Plan)
    monkeypatch.setattr(sublayers, "_KINDS", {"mhc_post_pre": Plan, "mhc_post": SimpleNamespace})
    y = sublayers._before_sublayer("mhc_post_pre", residual=torch.zeros((3, 4, 128)))[-1]
    assert plans.given_codes(y) == ("codes of", 3)
    assert sublayers._hyper_plan("mhc_post_pre", y).options == {"norms": (True,), "quantised": 32}
    assert sublayers._hyper_options(SimpleNamespace, 128) == {"norms": (True,)}  # type: ignore[arg-type]


def test_the_querys_norm_is_vllms_where_no_product_takes_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    plans.want_codes(128, 3)
    monkeypatch.setattr(sublayers, "NormPlan", Plan)
    monkeypatch.setattr(sublayers, "choice", lambda: KernelChoice({}))
    monkeypatch.setattr(Plan, "run", lambda self, **inputs: (inputs["qr"].clone(), inputs["kv"]))
    norm = sublayers.norm(lambda *given: "vLLM's")
    one = torch.ones(1, dtype=torch.bfloat16)
    weights = (one, one, 1e-6)

    def rows(tokens: int, width: int, **options: Any) -> torch.Tensor:
        return torch.zeros((tokens, width), **{"dtype": torch.bfloat16, **options})

    qr, kv = norm(rows(3, 128), rows(3, 512), *weights)
    assert (plans.given_codes(qr), plans.given_codes(kv)) == (("codes of", 3), None)
    for others in (
        (rows(4, 128), rows(4, 512)),
        (rows(3, 256), rows(3, 512)),
        (rows(3, 128), rows(3, 64)),
        (rows(3, 128, dtype=torch.float32), rows(3, 512)),
    ):
        assert norm(*others, *weights) == "vLLM's"


class SiluAndMulWithClamp:
    """Stand-in for vLLM's class."""

    alpha, beta, swiglu_limit = 1.0, 0.0, 10.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x[:, : x.shape[1] // 2], 7.0)


class Biased(SiluAndMulWithClamp):
    """A variant that computes something else."""

    beta = 1.0


class Mlp:
    """Stand-in for vLLM's `DeepseekV4MLP`; its second product returns its input."""

    def __init__(self, act: type) -> None:
        self.act_fn = act()
        self.gate_up_proj = lambda x: (x.repeat(1, 2), None)

        def down_proj(x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x, None

        down_proj.input_size_per_partition = 128  # type: ignore[attr-defined]
        self.down_proj = down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("replaced")


@pytest.mark.parametrize(("act", "tokens", "bundled"), [
    (SiluAndMulWithClamp, 3, True), (SiluAndMulWithClamp, 4, False), (Biased, 3, False),
])  # fmt: skip
def test_the_second_product_of_the_shared_experts_gets_codes(
    monkeypatch: pytest.MonkeyPatch, act: type, tokens: int, bundled: bool
) -> None:
    plans.want_codes(128, 3)
    monkeypatch.setattr(sublayers, "SiluMulPlan", Plan)
    module: Any = ModuleType("dsv4_test_model")

    class DeepseekV4MLP(Mlp):
        pass

    module.DeepseekV4MLP = DeepseekV4MLP
    hooks.apply(sublayers.shared_experts(module))
    found = DeepseekV4MLP(act).forward(torch.zeros((tokens, 128), dtype=torch.bfloat16))
    given = plans.given_codes(found)
    assert (given is not None) is bundled
    assert bool((found == 7.0).all()) is not bundled
    if given is not None:
        assert [tuple(one.shape) for one in given] == [(3, 128), (3, 1)]
