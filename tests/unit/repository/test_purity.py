"""Imports and calls that pure code may use. `lint-imports` checks the imports between packages of dsv4.

Pure code has no clock, files, network or tasks: time and observations are arguments. The same rules apply to all
modules of dsv4 that it imports, so helpers cannot add such access.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PURE = (
    "dsv4_operator.api",
    "dsv4_operator.planning",
    "dsv4_operator.lifecycle",
    "dsv4_operator.builders",
    "dsv4_runtime.agent.decide",
    "dsv4_runtime.health.rules",
    "dsv4_runtime.health.samples",
)
MODULES = frozenset(
    {"__future__", "annotated_types", "ast", "base64", "bisect", "collections", "contextlib", "copy", "dataclasses",
     "datetime", "difflib", "enum", "fractions", "functools", "hashlib", "importlib.resources", "inspect", "itertools",
     "json", "math",
     "pathlib", "pydantic", "pydantic_core", "re", "signal", "sys", "textwrap", "tomllib", "types", "typing",
     "urllib.parse", "weakref", "yaml"}
)  # fmt: skip
"""`importlib.resources` and `inspect` read files that are installed with the code."""
CLOCKS = frozenset({"now", "utcnow", "today"})
FILES = frozenset(
    {"exists", "glob", "is_dir", "is_file", "iterdir", "lstat", "mkdir", "open", "read_bytes", "read_text",
     "rename", "resolve", "rglob", "rmdir", "stat", "touch", "unlink", "write_bytes", "write_text"}
)  # fmt: skip
STATE = frozenset({"sys", "signal"})
"""State of the process. The names of signals, and code that runs only as a program, are allowed."""
BUILTINS = frozenset({"__import__", "breakpoint", "eval", "exec", "input", "open", "print"})


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def file_of(module: str) -> Path | None:
    """Return the file of a module of dsv4; None if there is none, as for a class."""
    side, *rest = module.split(".")
    place = ROOT / side.removeprefix("dsv4_") / side / Path(*rest)
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every imported module in `tree`, and every imported name, which may be a module too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def pure_files() -> dict[Path, str]:
    """Return the files of the pure packages and of all modules of dsv4 that these import, with the module's name."""
    found: dict[Path, str] = {}
    waiting = list(PURE)
    for package in PURE:
        folder = (file_of(package) or ROOT).parent
        if (folder / "__init__.py") == file_of(package):
            waiting += [
                f"{package}.{'.'.join(path.relative_to(folder).with_suffix('').parts)}" for path in folder.rglob("*.py")
            ]
    while waiting:
        module = waiting.pop()
        path = file_of(module)
        if path is None or path in found:
            continue
        found[path] = module
        waiting += [name for name in imported(tree_of(path)) if name.startswith("dsv4_")]
    return found


def allowed(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in MODULES) or name == "importlib"


def is_package_data(call: ast.Call) -> bool:
    """Return whether the call reads a file that is installed with the code."""
    return any(isinstance(node, ast.Name) and node.id == "resources" for node in ast.walk(call.func))


def impurities(tree: ast.Module) -> Iterator[str]:
    main = [node for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.dump(node.test)]
    program = {id(inner) for node in main for inner in ast.walk(node)}
    yield from (f"imports {name}" for name in imported(tree) if not name.startswith("dsv4_") and not allowed(name))
    for node in ast.walk(tree):
        if id(node) in program:
            continue
        if isinstance(node, ast.Attribute) and node.attr != "Signals":
            yield from (f"line {node.lineno}: {name}.{node.attr}" for name in STATE & {getattr(node.value, "id", "")})
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            yield f"line {node.lineno}: {node.func.id}()"
        if isinstance(node.func, ast.Attribute) and not is_package_data(node) and node.func.attr in CLOCKS | FILES:
            yield f"line {node.lineno}: .{node.func.attr}()"


@pytest.mark.parametrize(("path", "module"), sorted(pure_files().items()), ids=lambda value: str(value).split("/")[-1])
def test_pure_code_has_no_clock_no_files_and_no_network(path: Path, module: str) -> None:
    assert list(impurities(tree_of(path))) == []


def test_all_pure_packages_are_checked() -> None:
    modules = set(pure_files().values())
    assert {"dsv4_operator.lifecycle.decide", "dsv4_runtime.agent.decide.head", "dsv4_runtime.health.rules"} <= modules
    assert "dsv4_runtime.contract.plan" in modules, "what they import is looked at too"
    assert "dsv4_runtime.util.files" not in modules


@pytest.mark.parametrize(
    "code",
    [
        "import time",
        "from os import path",
        "from importlib import import_module",
        "import urllib.request",
        "from datetime import datetime\nnow = datetime.now()",
        "text = open('x').read()",
        "from pathlib import Path\ntext = Path('x').read_text()",
        "def f():\n    import socket",
        "import sys\nsys.exit()",
        "import signal\nsignal.alarm(1)",
    ],
)
def test_impure_code_is_found(code: str) -> None:
    assert list(impurities(ast.parse(code))) != []
