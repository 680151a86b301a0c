"""Log lines of dsv4's vLLM plugin: the implementation of each operation, and failures to load the plugin."""

from __future__ import annotations

import pytest

from dsv4_runtime.engine.logs import fatal, kernels, kernels_not_attached, plugin_failed

CHOSEN = (
    "(EngineCore pid=812) (RayWorkerProc pid=977, ip=10.88.0.11) INFO 11-23 15:02:11 [active.py:71] "
    'dsv4 kernels of rank 1: {"op":"mla_decode","provider":"bundled","standings":'
    '[{"provider":"bundled","slowness":1.0},{"provider":"flashmla","slowness":1.85},'
    '{"provider":"tilelang","excluded":"t1: CUDA error: out of memory"}]}'
)  # fmt: skip
REFUSED = (
    "(EngineCore pid=812) WARNING 11-23 15:02:01 [hooks.py:61] dsv4 kernels: mla_decode, o_proj stays with "
    "vLLM's own kernels (vllm.models.deepseek_v4.nvidia.model._select_dsv4_attn_cls of vllm 0.34.0: it is gone)"
)


@pytest.mark.parametrize("behind", ["", " [repeated 3x across cluster]"])
def test_the_provider_of_an_operation_is_read(behind: str) -> None:
    found = kernels(CHOSEN + behind)
    assert found is not None
    rank, status = found
    assert (rank, status.op, status.provider, status.against_next()) == (1, "mla_decode", "bundled", ("flashmla", 1.85))
    assert [one.excluded for one in status.standings] == [None, None, "t1: CUDA error: out of memory"]


def test_errors_of_an_excluded_provider_are_not_fatal() -> None:
    assert fatal(CHOSEN) is None
    said = "dsv4 kernels: tilelang of mla_decode is not used: t1: CUDA error: out of memory"
    assert fatal(f"WARNING 11-23 15:02:11 [active.py:64] {said}") is None


@pytest.mark.parametrize("line", [CHOSEN[:-40], "dsv4 kernels of rank 0: {}", "dsv4 kernels: moe=stock", REFUSED])
def test_lines_that_choose_nothing(line: str) -> None:
    assert kernels(line) is None


def test_operations_that_stay_with_vllm() -> None:
    found = kernels_not_attached(REFUSED)
    assert found is not None
    ops, why = found
    assert ops == ("mla_decode", "o_proj")
    assert why.startswith("stays with vLLM's own kernels (vllm.models")
    assert why.endswith("it is gone)")
    assert kernels_not_attached(CHOSEN) is None
    assert kernels_not_attached("dsv4 kernels: 31 plans compiled in 60.9 s") is None


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        ("Failed to load plugin dsv4", True),
        ("(EngineCore pid=812) ERROR 11-23 07:20:12 [__init__.py:72] Failed to load plugin dsv4", True),
        ("ERROR 11-23 07:20:12 [__init__.py:72] Failed to load plugin dsv4_dev", False),
        ("(APIServer pid=9) INFO 11-23 07:20:12 [logger.py:40] prompt: Failed to load plugin dsv4", False),
    ],
)
def test_vllm_goes_on_without_the_plugin(line: str, failed: bool) -> None:
    assert plugin_failed(line) is failed
