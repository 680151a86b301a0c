"""Compilers that a benchmark hides are missing for the process and its children; the rest of PATH stays available."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SEEN = """
import importlib, importlib.util, json, shutil
def tried(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return error.name
    return "imported"
print(json.dumps({
    "tilelang": [tried("tilelang"), importlib.util.find_spec("tilelang") is None],
    "inside": [tried("holder.third_party.deep_gemm"), tried("holder.third_party")],
    "nvcc": shutil.which("nvcc"), "cc": shutil.which("cc"), "json": importlib.util.find_spec("json") is not None,
}))
"""
PARENT = f"""
import subprocess, sys
from pathlib import Path
from benchmarks.gpu import absent
absent.PACKAGES = ("tilelang", "holder.third_party.deep_gemm")
import json
print(json.dumps(absent.hide(Path(sys.argv[1]))), flush=True)
exec({SEEN!r})
"""


@pytest.fixture
def world(tmp_path: Path) -> dict[str, str]:
    for folder in ("site/tilelang", "site/holder/third_party/deep_gemm"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("nvcc", "cc"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    (tmp_path / "hidden").mkdir()
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)]), "PATH": str(tools)}


def test_hidden_modules_and_programs_cannot_be_imported_or_found(world: dict[str, str], tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT, str(tmp_path / "hidden")]
    done = subprocess.run(argv, env=world, capture_output=True, text=True, timeout=120, check=True)
    found, seen = map(json.loads, done.stdout.splitlines())
    assert found == {
        "hidden": {"tilelang": True, "holder.third_party.deep_gemm": True},
        "hidden_nvcc": str(tmp_path / "tools" / "nvcc"),
        "hidden_c": None,
    }
    assert seen["tilelang"] == ["tilelang", True]
    assert seen["inside"] == ["holder.third_party.deep_gemm", "imported"]
    assert seen["nvcc"] is None
    assert Path(seen["cc"]).resolve() == tmp_path / "tools" / "cc", "a compiler for C beside it stays"
    assert seen["json"]


def test_children_do_not_find_it_either(world: dict[str, str], tmp_path: Path) -> None:
    script = PARENT.replace("exec(", "child = (")
    script = script.replace('("tilelang", "holder.third_party.deep_gemm")', "absent.PACKAGES")
    script += "subprocess.run([sys.executable, '-c', child], check=True)\n"
    argv = [sys.executable, "-c", script, str(tmp_path / "hidden")]
    done = subprocess.run(argv, env=world, capture_output=True, text=True, timeout=120, check=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["tilelang"] == ["tilelang", True]
    assert (seen["nvcc"], seen["json"]) == (None, True)


def test_hiding_after_the_import_of_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("gpu_absent", ROOT / "benchmarks" / "gpu" / "absent.py")
    assert spec
    assert spec.loader
    absent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(absent)
    monkeypatch.setitem(sys.modules, "torch", object())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="already"):
        absent.hide(tmp_path)
