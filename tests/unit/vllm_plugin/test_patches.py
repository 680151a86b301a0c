"""The mechanism of the register, on modules made for the test; `test_with_vllm.py` tests the patches themselves."""

import importlib
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4_runtime.util import files
from dsv4_runtime.vllm_cpu import patches as cpu_patches
from dsv4_runtime.vllm_plugin import register
from dsv4_runtime.vllm_plugin.patch import _FINDER, Patch, PatchOutcome, PatchRefusedError, after_import, refuse

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "patches.md"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the unique name of a module that can be imported but is not yet."""
    name = f"patched_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def patch(module: str, outcome: PatchOutcome | Exception) -> Patch:
    def apply() -> PatchOutcome:
        if isinstance(outcome, Exception):
            raise outcome
        sys.modules[module].value = 2  # type: ignore[attr-defined]
        return outcome

    return Patch(
        module=module,
        symbol="value",
        why="it is 1",
        upstream="none",
        versions="0",
        obsolete_when="it is 2",
        apply=apply,
    )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    register.register.cache_clear()
    yield monkeypatch
    register.register.cache_clear()


def test_the_page_is_fresh():
    assert PAGE.read_text() == cpu_patches.page(), (
        "run: python -m dsv4_runtime.vllm_cpu.patches > docs/reference/patches.md"
    )


def test_every_patch_is_documented_in_full():
    known = register.PATCHES + cpu_patches.PATCHES
    for entry in known:
        for field in (entry.module, entry.symbol, entry.why, entry.upstream, entry.versions, entry.obsolete_when):
            assert field
        assert entry.module.startswith(("vllm.", "torch."))
        assert entry.symbol in cpu_patches.page()
    assert len({(entry.module, entry.symbol) for entry in known}) == len(known)


def test_an_action_waits_for_the_import(module: str):
    calls: list[str] = []
    after_import(module, lambda: calls.append("first"))
    after_import(module, lambda: calls.append("second"))
    assert not calls
    assert importlib.import_module(module).value == 1
    assert calls == ["first", "second"]
    after_import(module, lambda: calls.append("now"))
    assert calls == ["first", "second", "now"]


def test_the_imported_module_is_itself(module: str):
    after_import(module, lambda: None)
    found = importlib.import_module(module)
    assert found.__spec__ is not None
    assert found.__spec__.name == module
    assert found.__file__ is not None
    assert found.__file__.endswith(f"{module}.py")


def test_actions_are_kept_if_only_the_modules_spec_is_read(module: str):
    """vLLM's registry, pkgutil and others call `find_spec`; the module may also be executed manually."""
    calls: list[str] = []
    after_import(module, lambda: calls.append("done"))
    for _ in range(2):
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.loader is not None
        assert "value" in spec.loader.get_source(module)  # type: ignore[attr-defined]
    by_hand = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(by_hand)
    assert calls == []
    importlib.import_module(module)
    assert calls == ["done"]
    sys.modules.pop(module)
    importlib.import_module(module)
    assert calls == ["done"], "once"


def test_an_import_that_fails_once_loses_no_action(module: str):
    calls: list[str] = []
    source = Path(importlib.util.find_spec(module).origin)  # type: ignore[arg-type, union-attr]
    good = source.read_text()
    after_import(module, lambda: calls.append("done"))
    source.write_text("raise ImportError('once, for lack of memory')")
    for _ in range(2):
        with pytest.raises(ImportError, match="once"):
            importlib.import_module(module)
    assert calls == []
    source.write_text(f"{good}\n# whole")
    importlib.import_module(module)
    assert calls == ["done"]


def test_an_action_that_raises_waits_for_the_next_import(module: str):
    """Otherwise the second import would leave the module unpatched without an error."""
    calls: list[str] = []

    def action() -> None:
        calls.append("called")
        raise PatchRefusedError("never")

    after_import(module, action)
    for _ in range(2):
        with pytest.raises(PatchRefusedError):
            importlib.import_module(module)
    assert calls == ["called", "called"]


def test_an_action_for_a_module_that_is_being_imported_runs_at_its_end(module: str, monkeypatch: pytest.MonkeyPatch):
    calls: list[object] = []
    source = Path(importlib.util.find_spec(module).origin)  # type: ignore[arg-type, union-attr]
    source.write_text("import sys\nsys.dsv4_hook()\nvalue = 1\n")

    def hook() -> None:
        after_import(module, lambda: calls.append(sys.modules[module].value))

    monkeypatch.setattr(sys, "dsv4_hook", hook, raising=False)
    after_import(module, lambda: calls.append("first"))
    importlib.import_module(module)
    assert calls == ["first", 1]


def test_an_action_for_a_missing_module_fails_only_at_the_import():
    after_import("no_such_module_at_all", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        importlib.import_module("no_such_module_at_all")


def test_registering_twice_patches_once(module: str, registered: pytest.MonkeyPatch):
    registered.setattr(register, "PATCHES", (patch(module, PatchOutcome.APPLIED),))
    register.register()
    register.register()
    assert importlib.import_module(module).value == 2
    assert module not in _FINDER.waiting


def test_a_refusal_fails_the_import_and_names_symbol_version_and_difference(
    module: str, registered: pytest.MonkeyPatch
):
    registered.setattr(register, "PATCHES", (patch(module, refuse("value", "it is 3, expected 1")),))
    register.register()
    with pytest.raises(PatchRefusedError, match=r"value refused on vllm.*: it is 3, expected 1\. Compare") as caught:
        importlib.import_module(module)
    assert "adapt or delete" in str(caught.value)
    assert module not in sys.modules


def test_a_patch_that_is_no_longer_needed_is_logged(
    module: str, registered: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    registered.setattr(register, "PATCHES", (patch(module, PatchOutcome.NOT_NEEDED),))
    registered.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger="vllm.dsv4")
    register.register()
    importlib.import_module(module)
    assert "Patch of value can be deleted" in caplog.text


_WITHOUT_KERNELS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dsv4_kernels":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from dsv4_runtime.vllm_plugin import register
"""


def test_the_plugin_loads_where_the_kernels_are_not_installed() -> None:
    """Images for CPU have no kernels; vLLM skips a plugin that fails to load, with its patches, and starts."""
    subprocess.run([sys.executable, "-c", _WITHOUT_KERNELS], check=True, timeout=120)


def test_collectives_that_cannot_be_counted_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The count only names a culprit."""
    monkeypatch.setattr(files, "_SHARED_MEMORY", tmp_path / "missing")
    register._ledger.cache_clear()
    collective = register._counted(lambda group: group.world_size)
    try:
        with caplog.at_level(logging.WARNING, "vllm.dsv4"):
            assert [collective(SimpleNamespace(world_size=size)) for size in (2, 2, 1)] == [2, 2, 1]
    finally:
        register._ledger.cache_clear()
    assert caplog.text.count("collectives are not counted") == 1
