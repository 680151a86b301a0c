"""Requirements on every row of the registry, and every case of every row against its reference."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import pkgutil
import re
import zlib
from pathlib import Path

import pytest
import torch

import dsv4_kernels
from dsv4_kernels import plan as planning
from dsv4_kernels import registry
from dsv4_kernels.arch import Arch
from dsv4_kernels.registry import FOLDERS, Case, Operation, Tolerance, operations

CASES = [pytest.param(op, c, id=f"{op.name}-{c.name}") for op in operations() for c in op.cases_with("cpu")]
GPU_CASES = [pytest.param(op, c, id=f"{op.name}-{c.name}") for op in operations() for c in op.cases_with("gpu")]
NOT_OPERATIONS = {"gate", "testing"}


def test_every_folder_is_in_the_registry() -> None:
    folders = {m.name for m in pkgutil.iter_modules(dsv4_kernels.__path__) if m.ispkg} - NOT_OPERATIONS
    assert folders == set(FOLDERS)


@pytest.mark.parametrize("op", operations(), ids=lambda op: op.name)
def test_row_is_complete(op: Operation) -> None:
    assert len(op.contract) > 400, "the folder's docstring is the contract"
    assert len(op.tolerance) == len(op.outputs)
    assert op.cases_with("cpu")
    assert op.cases_with("gpu")
    assert op.cases_with("bench")
    for c in op.cases:
        assert op.nbytes(c.params) >= 0
        assert op.flops(c.params) >= 0
    source = inspect.getsource(importlib.import_module(f"dsv4_kernels.{op.folder}.kernel"))
    assert "import torch" not in source, "the gate compiles without torch"
    parameters = inspect.signature(op.reference).parameters
    assert "exact" in parameters


def test_every_launch_is_a_launchers() -> None:
    """`Launcher` takes arguments by name and checks their order: kernels have up to 32, mostly integers."""
    others, launches = [], 0
    for path in sorted(Path(dsv4_kernels.__path__[0]).rglob("*.py")):
        source = path.read_text()
        launchers = set(re.findall(r"^(_\w+) = Launcher\(", source, re.MULTILINE))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                kernel = ast.unparse(node.func.value)
                launches += kernel in launchers
                others += [f"{path.name}:{node.lineno} {kernel}"] if kernel.endswith("_kernel") else []
    assert launches >= 30
    assert others == []


def test_the_stated_bytes_and_reason(device: torch.device) -> None:
    for op in operations():
        for c in op.cases:
            support = op.is_supported(c.params, Arch.SM_120)
            assert support, support.reason


@pytest.mark.interpreter
@pytest.mark.parametrize(("op", "case"), CASES)
def test_case_in_the_interpreter(op: Operation, case: Case, device: torch.device, arch: Arch | None) -> None:
    registry.run_case(op, case, device, zlib.crc32(case.name.encode()), arch)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), GPU_CASES)
def test_case_on_the_gpu(op: Operation, case: Case, device: torch.device) -> None:
    for seed in (1, 2):
        print(op.name, case.name, {k: str(v) for k, v in registry.run_case(op, case, device, seed).items()})


@pytest.mark.gpu
@pytest.mark.parametrize("op", operations(), ids=lambda op: op.name)
def test_capture_replay_and_freeze(op: Operation, device: torch.device) -> None:
    """After warm-up nothing is compiled, and a graph replays on new data with the same bits as a direct run, twice."""
    case = op.cases_with("bench")[0]
    plan = op.plan(case.params, device, None)
    plan.warmup()
    planning.freeze()
    try:
        static_inputs = op.make_inputs(case.params, device, 1)
        plan.run(**static_inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = registry.as_outputs(plan.run(**static_inputs))
        for seed in (2, 3):
            for name, value in op.make_inputs(case.params, device, seed).items():
                if isinstance(value, torch.Tensor) and name not in op.mutates:
                    static_inputs[name].copy_(value)
            direct = [t.clone() for t in registry.as_outputs(plan.run(**static_inputs))]
            for _ in range(2):
                graph.replay()
                torch.cuda.synchronize()
                for a, b in zip(captured, direct, strict=True):
                    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    finally:
        planning.thaw()


@pytest.mark.interpreter
@pytest.mark.parametrize("op", operations(), ids=lambda op: op.name)
def test_warmup_runs_on_its_own_inputs(op: Operation, device: torch.device) -> None:
    """Warm-up makes its own inputs; a serving process that cannot warm up cannot freeze."""
    smallest = min(
        (c for c in op.cases_with("cpu") if op.nbytes(c.params)), key=lambda c: op.nbytes(c.params) + op.flops(c.params)
    )
    op.plan(smallest.params, device, Arch.SM_120).warmup()


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "op", [op for op in operations() if any(c.name == "empty" for c in op.cases)], ids=lambda op: op.name
)
def test_a_plan_for_nothing_warms_up(op: Operation, device: torch.device) -> None:
    (empty,) = (c for c in op.cases if c.name == "empty")
    op.plan(empty.params, device, Arch.SM_120).warmup()


@pytest.mark.parametrize("tolerance", [
    Tolerance(absolute=1e-3), Tolerance(relative=1e-3), Tolerance(absolute=1.0, relative=1.0), Tolerance(rms=1e-3),
    Tolerance(diff=1e-3), Tolerance(bitwise=True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("out", "reference"), [
    (5.0, -torch.inf), (5.0, torch.nan), (torch.inf, -torch.inf), (torch.nan, 1.0), (torch.inf, 1.0),
    (-torch.inf, torch.nan),
])  # fmt: skip
def test_only_equal_infinities_agree(out: float, reference: float, tolerance: Tolerance) -> None:
    found = registry.measure(torch.tensor([out, 1.0]), torch.tensor([reference, 1.0]), tolerance)
    if tolerance.bitwise or tolerance.absolute is not None or tolerance.relative is not None:
        assert found.outside == 0.5
    with pytest.raises(AssertionError, match=r"outside|above"):
        registry.judge("out", found, tolerance)
    same = registry.measure(torch.tensor([reference, 1.0]), torch.tensor([reference, 1.0]), tolerance)
    if not math.isnan(reference):
        registry.judge("out", same, tolerance)
