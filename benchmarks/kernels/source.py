"""Load single Triton functions from an external source file, without its package.

No such file is part of this repository; fetch.py stores them in third_party/peers.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl


def installed(name: str) -> bool:
    """Return whether a module can be found, without loading it; its parent packages are loaded."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def load(path: Path, package: str, **given: Any) -> types.ModuleType:
    """Execute a file without its imports from `package`; `given` replaces the imported names.

    The file keeps its own line numbers, because Triton reads a kernel's source from the file.
    """
    tree = ast.parse(path.read_text())
    kept: list[ast.stmt] = []
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if not any(name.split(".")[0] == package for name in names):
            kept.append(node)
    return _execute(path, kept, given)


def load_functions(path: Path, names: tuple[str, ...], **given: Any) -> types.ModuleType:
    """Execute only the named functions of a file."""
    tree = ast.parse(path.read_text())
    kept: list[ast.stmt] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    missing = set(names) - {n.name for n in kept if isinstance(n, ast.FunctionDef)}
    if missing:
        raise ImportError(f"{path} has no {sorted(missing)}")
    return _execute(path, kept, given)


def _execute(path: Path, body: list[ast.stmt], given: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(f"peer_{path.stem}")
    sys.modules[module.__name__] = module
    vars(module).update({"torch": torch, "triton": triton, "tl": tl, "__file__": str(path.resolve()), **given})
    code = compile(ast.Module(body=body, type_ignores=[]), str(path.resolve()), "exec")
    exec(code, vars(module))
    return module
