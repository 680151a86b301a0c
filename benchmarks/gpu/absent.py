"""Hide compilers from this process and its children: Python packages that compile kernels, and nvcc.

`hide` must be called before the import of vLLM. A hidden package cannot be imported, and `importlib.util.find_spec`
does not find it, so vLLM's `has_deep_gemm()` and similar functions return False. Only the standard library is used
here: child processes import a copy of this file before all other modules.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    "deep_gemm",
    "vllm.third_party.deep_gemm",
    "tilelang",
    "cutlass",
    "flashinfer",
    "flashinfer_cubin",
    "flashinfer_jit_cache",
)
_COPY = "dsv4_absent"
_NVCC = re.compile(r"nvcc.*")
_C_COMPILERS = re.compile(r"([a-z0-9_]+-linux-gnu-)?(cc|c\+\+|c[89]9|gcc|g\+\+|clang|clang\+\+|tcc|icc|icx)(-[0-9.]+)?")


def hidden(name: str) -> bool:
    """Return whether the module `name` is one of `PACKAGES` or inside of one."""
    return any(name == package or name.startswith(f"{package}.") for package in PACKAGES)


class Hidden(importlib.abc.MetaPathFinder):
    """Rejects imports of hidden modules."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Raise an error for a hidden module; leave others to the next finder."""
        if hidden(name):
            raise ModuleNotFoundError(f"No module named {name!r} (hidden)", name=name)


def block() -> None:
    """Hide the packages in this process."""
    loaded = [name for name in sys.modules if hidden(name)]
    if loaded:
        raise RuntimeError(f"{loaded[0]} is imported already")
    original = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if hidden(importlib.util.resolve_name(name, package)) else original(name, package)

    importlib.util.find_spec = find_spec
    sys.meta_path.insert(0, Hidden())


def _installed(package: str) -> bool:
    """Return whether `package` is installed, without importing its parents."""
    top, _, rest = package.partition(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not rest:
        return spec is not None
    return any(Path(place, *rest.split(".")).exists() for place in spec.submodule_search_locations or ())


def _path_without(programs: Sequence[re.Pattern[str]], folder: Path) -> str:
    """Return PATH with each folder that contains one of `programs` replaced by links to its other files."""
    places = os.environ.get("PATH", os.defpath).split(os.pathsep)
    for number, place in enumerate(places):
        files = list(Path(place).iterdir()) if Path(place).is_dir() else []
        kept = [file for file in files if not any(program.fullmatch(file.name) for program in programs)]
        if len(kept) < len(files):
            links = folder / f"bin{number}"
            links.mkdir()
            for file in kept:
                (links / file.name).symlink_to(file)
            places[number] = str(links)
    return os.pathsep.join(places)


def hide(folder: Path, *, c: bool = False) -> dict[str, Any]:
    """Hide packages and nvcc from this process and its children; return which of them are installed.

    Args:
        folder: an empty one that lives as long as this process; it receives the modules that children import first.
        c: hide C compilers too, with which Triton compiles its launchers.
    """
    if "vllm" in sys.modules or "torch" in sys.modules:
        raise RuntimeError("vLLM or torch is imported already, and has looked for compilers")
    found = {package: _installed(package) for package in PACKAGES}
    nvcc, hidden_c = shutil.which("nvcc"), (shutil.which("gcc") or shutil.which("clang")) if c else None
    shutil.copyfile(__file__, folder / f"{_COPY}.py")
    (folder / "sitecustomize.py").write_text(f"import {_COPY}\n\n{_COPY}.block()\n")
    inherited = os.environ.get("PYTHONPATH")
    os.environ.update(
        PYTHONPATH=os.pathsep.join([str(folder), *([inherited] if inherited else [])]),
        PATH=_path_without([_NVCC, *([_C_COMPILERS] if c else [])], folder),
        CUDA_HOME=str(folder / "no-cuda"),
        CUDA_PATH=str(folder / "no-cuda"),
    )
    if c:
        for variable in ("CC", "CXX"):
            os.environ.pop(variable, None)
    block()
    return {"hidden": found, "hidden_nvcc": nvcc, "hidden_c": hidden_c}


def seen() -> dict[str, Any]:
    """Return the compilers available to vLLM, and hidden modules that are imported nevertheless."""
    from torch.utils import cpp_extension
    from vllm.utils import flashinfer, import_utils

    return {
        "deep_gemm": import_utils.has_deep_gemm(),
        "tilelang": import_utils.has_tilelang(),
        "cutedsl": import_utils.has_cutedsl(),
        "flashinfer": flashinfer.has_flashinfer(),
        "nvcc": shutil.which("nvcc"),
        "c": shutil.which("gcc") or shutil.which("clang") or shutil.which("cc"),
        "nvcc_of_torch": shutil.which(str(Path(str(cpp_extension.CUDA_HOME), "bin", "nvcc"))),
        "imported": [name for name in sys.modules if hidden(name)],
    }
