"""FlashInfer and b12x as providers: only offered on 12.x, called as vLLM calls them, and excluded with a reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4_kernels import registry
from dsv4_runtime.contract.kernels import Op
from dsv4_runtime.vllm_plugin.kernels import providers
from dsv4_testkit.vllm_script import told_by

OFFERED = {Op.MOE: "b12x", Op.FP8_LINEAR: "b12x", Op.MLA_DECODE: "flashinfer", Op.MLA_PREFILL: "flashinfer"}
MISSING = (
    providers.flash_infer_missing,
    providers.b12x_linear_missing,
    providers.b12x_moe_missing,
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove registrations for another card."""
    monkeypatch.setattr(registry, "_ADDED", {})
    providers.register.cache_clear()
    yield
    providers.register.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    monkeypatch.setattr(providers, "capability", lambda: (major, minor))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("minor", [0, 1])
def test_both_providers_are_offered_on_12_x(monkeypatch: pytest.MonkeyPatch, minor: int) -> None:
    on(monkeypatch, 12, minor)
    for op in Op:
        assert [name for name in providers.names(op) if name in ("flashinfer", "b12x")] == [
            name for at, name in OFFERED.items() if at is op
        ]
    assert providers.find("mla_decode", "flashinfer")[1].rough
    assert providers.find("moe_w4a16", "b12x")[1].make is providers.b12x_moe


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (0, 0)])
def test_no_process_is_started_for_them_elsewhere(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    on(monkeypatch, *capability)
    assert not {"flashinfer", "b12x"} & {name for op in Op for name in providers.names(op)}
    with pytest.raises(KeyError, match="mla_decode has no provider 'flashinfer'"):
        providers.find("mla_decode", "flashinfer")
    for missing in MISSING:
        assert f"on compute capability 12.x, this card has {capability[0]}.{capability[1]}" in (missing() or "")


@pytest.mark.parametrize("missing", MISSING)
def test_without_the_package_they_are_not_there(monkeypatch: pytest.MonkeyPatch, missing: Any) -> None:
    on(monkeypatch, 12, 0)
    monkeypatch.setattr(providers, "find_spec", lambda package: None)
    assert missing() in ("flashinfer is not installed", "b12x is not installed")


def test_the_process_that_starts_the_trials_imports_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 12, 0)
    before = set(sys.modules)
    for op in Op:
        providers.names(op)
    assert not [name for name in set(sys.modules) - before if name.split(".")[0] in ("vllm", "flashinfer", "b12x")]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return told_by(Path(__file__).with_name("sm12x_with_vllm.py"))


@pytest.mark.parametrize("what", ["decode", "window", "prefill", "linear", "experts"])
def test_inputs_of_the_providers_have_the_meaning_of_the_contract(found: dict[str, Any], what: str) -> None:
    """The stand-ins refuse the same inputs as the packages, and compute in torch according to their sources."""
    seen = found[what]["seen"]
    assert "fault" not in seen
    assert seen["error"] < 5e-3
    assert found[what]["timed"]


def test_decode_is_called_as_vllms_class_for_sm12x_calls_it(found: dict[str, Any]) -> None:
    call = found["decode"]["calls"][0]
    # 13 heads, padded to 16; five tokens, with 128 of the window and 96 chosen.
    assert call["query"] == call["out"] == ["bfloat16", 5, 16, 512]
    assert call["swa"][2:] == call["compressed"][2:] == [64, 1, 584]
    assert (call["sparse_indices"], call["lens"]) == (["int32", 5, 128], ["int32", 5])
    assert (call["extra"], call["extra_lens"]) == (["int32", 5, 1, 96], ["int32", 5])
    assert (call["workspace"], call["sinks"]) == (["uint8", 128 << 20], ["float32", 16])
    assert (call["kv_layout"], call["scale"]) == ("NHD", pytest.approx(512**-0.5))
    assert [found["window"]["calls"][0][name] for name in ("compressed", "extra", "extra_lens")] == [None] * 3


def test_prefill_is_the_same_call_with_the_window_first(found: dict[str, Any]) -> None:
    call = found["prefill"]["calls"][0]
    assert (call["sparse_indices"], call["extra"]) == (["int32", 70, 128], ["int32", 70, 256])
    assert call["swa"] == call["compressed"] == ["uint8", 16, 64, 1, 584]


def test_b12x_gets_the_inputs_of_vllms_layers(found: dict[str, Any]) -> None:
    product = found["linear"]["calls"][0]
    assert (product["lhs"], product["lhs_scale"]) == (["float8_e4m3fn", 3, 384], ["float32", 3, 3])
    assert (product["rhs"], product["rhs_scale"]) == (["float8_e4m3fn", 256, 384], ["float32", 2, 3])
    weights, call = found["experts"]["calls"][:2]
    assert (weights["modes"], weights["source"], weights["layout"]) == ("w4a16", "fp4_e8m0_k32", "w31")
    assert (call["a"], call["ids"], call["limit"]) == (["bfloat16", 4, 256], ["int32", 4, 6], 10.0)
    # The weights are prepared once, before the timed calls.
    assert [("modes" in one) for one in found["experts"]["calls"]] == [True, False, False]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("other window", "ValueError: FlashInfer has no sparse attention for 13 heads and a window of 96"),
        ("odd product", "ValueError: vLLM gives b12x weights of multiples of 128, not 192 x 384"),
        (
            "other decode",
            "decode_sparse_mla_dsv4 does not accept the arguments of vLLM 0.33: missing a required argument",
        ),
        ("other linear", "mm_block_fp8 does not accept the arguments of vLLM 0.33: got an unexpected keyword argument"),
        ("other experts", "Caps does not accept the arguments of vLLM 0.33: got an unexpected keyword argument 'core"),
        ("not for b12x", "not here: b12x has no experts here"),
    ],
)
def test_unsupported_inputs_exclude_a_provider_with_a_reason(found: dict[str, Any], what: str, reason: str) -> None:
    assert reason in found[what]["seen"]["fault"]
    assert not found[what]["timed"]
    assert found[what]["calls"] == []


def test_rough_attention_is_excluded_but_timed(found: dict[str, Any]) -> None:
    assert found["rough"]["seen"]["fault"].startswith(f"wrong: it {providers.FP8_ATTENTION}: mla_decode.o: diff")
    assert found["rough"]["timed"]
