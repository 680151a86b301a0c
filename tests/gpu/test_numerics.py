"""Every operation of `dsv4_kernels` on the GPU, against its reference in float64."""

from __future__ import annotations

import zlib

import pytest
from page import Page

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from dsv4_kernels import registry  # noqa: E402
from dsv4_kernels.arch import detect  # noqa: E402
from dsv4_kernels.registry import Case, Operation, operations  # noqa: E402

CASES = [
    pytest.param(operation, case, id=f"{operation.name}-{case.name}")
    for operation in operations()
    for case in operation.cases_with("gpu")
]


@pytest.mark.parametrize(("operation", "case"), CASES)
def test_error(operation: Operation, case: Case, page: Page) -> None:
    if detect("cuda") is None:
        pytest.skip("no table of configurations for this GPU")
    try:
        errors = registry.run_case(operation, case, torch.device("cuda"), zlib.crc32(case.name.encode()))
    except AssertionError as error:
        page.row("Kernels", ("operation", "case", "output", "error"), operation.name, case.name, "", f"FAILED: {error}")
        raise
    for output, measured in errors.items():
        page.row("Kernels", ("operation", "case", "output", "error"), operation.name, case.name, output, measured)
