"""The patches on the installed vLLM: each finds its known symbol, and its replacement computes the same results."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from dsv4_runtime.engine.logs import progress
from dsv4_testkit.vllm_script import told_by_fork


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return told_by_fork(Path(__file__).with_name("with_vllm.py"))


def test_the_development_platform_is_chosen(found: dict[str, Any]):
    assert (found["platform"], found["ray device"]) == ("DevCpuPlatform", "GPU")


def test_the_tile_scheduler_supports_all_layer_types(found: dict[str, Any]):
    assert found["layer types"] == ["c128a", "c1a", "c2a", "c4a", "swaonly"]


def test_window_indices_are_those_of_the_kernel(found: dict[str, Any]):
    assert found["window indices"] is True


@pytest.mark.parametrize("what", ["block tables", "compressed slots"])
def test_slots_are_those_of_the_kernels(found: dict[str, Any], what: str):
    assert found[what] is True


def test_the_models_that_draft_are_there(found: dict[str, Any]):
    assert found["drafting models"] == ["DeepSeekV4MTP", "CpuDSpark"]


@pytest.mark.parametrize("what", ["draft norms", "block attention"])
def test_drafts_compute_the_results_defined_by_vllm(found: dict[str, Any], what: str):
    assert found[what] is True


def test_prefill_lists_of_the_kernels_package_are_those_of_vllm(found: dict[str, Any]):
    assert found["prefill lists"] is True


def test_the_scores_of_drafts_of_any_length_are_planned_with_the_first(found: dict[str, Any]):
    assert found["scores of drafts"] == {"agree": True, "made": [[1, 2, 3, 4]]}


def test_a_layers_product_is_bundled_as_far_as_its_plan_goes(found: dict[str, Any]):
    assert found["products"] == {"shape": [2, 3, 80], "agree": True, "given": True, "others": ["stock", "stock"]}


def test_operations_before_products_pass_on_fp8_codes(found: dict[str, Any]):
    assert found["inputs with codes"] == {"output": True, "query": True, "sublayer": True, "shared experts": True}


def test_decode_uses_the_plans_made_with_the_kv_cache(found: dict[str, Any]):
    assert found["decode plans"] == {"1": 1, "4": 1, "128": 1, "dspark": 1}


def test_dsparks_layers_alone_list_their_block_beside_the_window(found: dict[str, Any]):
    assert found["columns of the window"] == [128, 128, 128, 192]


def test_a_models_class_is_inspected_in_a_fork(found: dict[str, Any]):
    assert found["inspected in a fork"] is True


def test_only_the_named_blocks_are_zeroed(found: dict[str, Any]):
    assert found["zeroed words"] == [8, 9, 10, 12, 13, 24, 25, 26, 28, 29]


def test_the_compiled_header_is_kept_with_the_kernels(found: dict[str, Any]):
    assert found["inductor cache"].startswith(tempfile.gettempdir())
    assert found["header"] == f"{found['inductor cache']}/precompiled_headers"


def test_queues_pause(found: dict[str, Any]):
    assert found["queue pauses"] == "functools.partial(<built-in function sleep>, 0.0005)"


def test_every_processor_has_the_operators_of_the_model(found: dict[str, Any]):
    assert found["operators missing"] == []


@pytest.mark.parametrize("form", ["auto", "safetensors"])
def test_the_registered_loader_reads_the_same_weights_and_reports_progress(found: dict[str, Any], form: str):
    made = found["loads"][form]
    assert (made["loader"], made["names"]) == ("TellingDefaultModelLoader", ["w0", "w1"])
    told = progress(made["lines"][-1])
    assert told is not None
    assert told.weights is not None
    assert (told.weights.bytes_done, told.weights.bytes_total) == (8_000_000, 8_000_000)
    assert found["other loader"] == "DummyModelLoader"


def test_an_unquantized_model_is_restored_without_its_files(found: dict[str, Any]) -> None:
    from_files, retained = found["restored"]
    assert from_files.startswith("Following weights were not initialized from checkpoint")
    assert retained == "loaded"
