"""Kernels that are compiled without a GPU for engines that take them from there."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dsv4_kernels.arch import Arch
from dsv4_kernels.precompile import ShippedError
from dsv4_operator.planning.catalog import checkpoint_named
from dsv4_operator.planning.catalog.checkpoint import model_config
from dsv4_runtime.vllm_plugin.kernels import v033
from dsv4_runtime.vllm_plugin.kernels.shipping import FEW_TOKENS, Engine, documents, main, plans_of
from dsv4_testkit.plans import FLASH

_OTHERS = {
    "_DEQUANTIZE_AND_GATHER_K_CACHE_KERNEL": "its keys contain strides of the KV cache",
    "_SAVE_PARTIAL_STATES_KERNEL": "bundled",
    "_FUSED_KV_COMPRESS_NORM_ROPE_INSERT_INDEXER_TRITON_KERNEL": "bundled",
    "_FUSED_INV_ROPE_FP8_QUANT_KERNEL": "bundled",
    "_PACK_SEQ_TRITON_KERNEL": "bundled scores need no packed queries",
    "_COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL": "drafts",
    "_BUILD_FLASHINFER_MIXED_SPARSE_INDICES_KERNEL": "FlashInfer",
    "_PACK_DCP_TOPK_CANDIDATES_KERNEL": "context parallelism",
    "_STABLE_TOPK_FROM_GATHERED_CANDIDATES_KERNEL": "context parallelism",
}
"""Triton kernels that vLLM's layers register and that are not shipped, with the reason."""


def bound(lines: Iterable[str]) -> set[str]:
    """Return lines with all arguments by name."""
    found = set()
    for one in lines:
        described = json.loads(one)
        module, _, name = described["plan"].partition(":")
        signature = inspect.signature(getattr(import_module(module), name))
        arguments = signature.bind(*described["args"], **described["options"])
        arguments.apply_defaults()
        found.add(json.dumps([described["plan"], arguments.arguments], sort_keys=True, default=str))
    return found


def flash(**sizes: int) -> Engine:
    model = checkpoint_named("V4-Flash")
    assert model is not None
    return Engine(model_config(model), **{"context": 9216, **sizes})


def test_the_plans_of_flash_are_those_of_an_engine() -> None:
    """`FLASH` was read from the layers' announcements on an H100."""
    needs_cache = re.compile(r"api:(DecodePlan|InsertPlan|SavePlan|StorePlan|ProjectionPlan|PagedLogitsPlan)")
    # Where the products take all tokens, the norm with codes does too.
    unused = re.compile(r'"args": \[8192, 1024, "device"\], "options": {}, "plan": "dsv4_kernels.front.api:NormPlan"')
    announced = [one for one in FLASH if not needs_cache.search(one) and not unused.search(one)]
    assert len(announced) > 20
    assert bound(announced) <= bound(plans_of(flash(), Arch.SM_90))


@pytest.mark.parametrize("arch", [Arch.SM_120, Arch.SM_121])
def test_products_of_sm12x_are_those_of_few_tokens(arch: Arch) -> None:
    sizes = {
        next(iter(described["args"]))
        for described in map(json.loads, plans_of(flash(tensor_parallel=2), arch))
        if described["plan"].endswith(":QuantPlan")
    }
    assert sizes == {FEW_TOKENS}


def test_a_rank_has_its_share() -> None:
    def experts(ranks: int) -> list[int]:
        lines = map(json.loads, plans_of(flash(tensor_parallel=ranks), Arch.SM_121))
        return [one["options"]["inter"] for one in lines if one["plan"].endswith(":MoePlan")]

    assert experts(1) == [2048, 2048]
    assert experts(4) == [512, 512]


@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        ({"q_lora_rank": None}, 1, "config.json has no number q_lora_rank"),
        ({"o_groups": "8"}, 1, "config.json has no number o_groups"),
        ({}, 3, "--tensor-parallel 3 does not divide num_attention_heads, which is 64"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], ranks: int, said: str) -> None:
    config = {**flash().config, **change}
    with pytest.raises(ShippedError, match=said):
        Engine(config, tensor_parallel=ranks)


@pytest.mark.parametrize("size", ["tensor_parallel", "tokens", "requests", "context"])
def test_a_size_below_one_is_named(size: str) -> None:
    with pytest.raises(ShippedError, match=f"--{size.replace('_', '-')} 0 is too small"):
        Engine(flash().config, **{size: 0})


def test_results_are_found_among_log_lines() -> None:
    output = 'INFO 11-27 [utils.py:1] loaded\n{"calls": 3, "errors": []}\n[1]\n7\nINFO: destroyed\n{"calls\n'
    assert list(documents(output)) == [{"calls": 3, "errors": []}]
    assert list(documents("")) == []


@pytest.mark.parametrize("text", ["{", "[1]", "7", '{"text_config": 7}', "\ufeff{}"])
def test_a_file_that_is_no_configuration_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SystemExit, match=r"dsv4 kernels compile: .*config.json is no config.json of a model"):
        main([str(tmp_path), "--arch", "sm_121", "--out", str(tmp_path / "out")])


def test_every_triton_kernel_that_the_layers_register_is_shipped_or_has_a_reason() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(spec.submodule_search_locations[0])
    files = ("models/deepseek_v4/attention.py", "models/deepseek_v4/compressor.py",
             "model_executor/layers/sparse_attn_indexer.py")  # fmt: skip
    registered = {
        call.func.value.id
        for file in files
        for call in ast.walk(ast.parse((root / file).read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "register_warmup"
        if isinstance(call.func.value, ast.Name)
    }
    others = {name for name in registered if "CUTEDSL" in name or name.startswith(("_SPARSE_ATTN_", "indexer_q"))}
    shipped = {location.partition(":")[2] for location in v033.LAYER_KERNELS}
    assert registered - others - _OTHERS.keys() == shipped & registered
    assert shipped <= registered
