"""The lines in which an engine tells its choice are those that the agent reads."""

from __future__ import annotations

from dsv4_runtime.contract.kernels import BUNDLED, STOCK, KernelChoice, Op
from dsv4_runtime.engine.logs import kernels
from dsv4_runtime.vllm_plugin.kernels.active import report_lines
from dsv4_runtime.vllm_plugin.kernels.evidence import Standing

STANDINGS = (
    Standing(Op.MOE, BUNDLED, 1.0),
    Standing(Op.MOE, "marlin", 1.28049),
    Standing(Op.MOE, "deep_gemm", None, "t1: ValueError: " + "no\n" * 4000),
    Standing(Op.MOE, "cutlass", None, "t1: not here: needs compute capability 10"),
)


def test_the_agent_reads_what_the_engine_tells() -> None:
    lines = report_lines(KernelChoice({Op.MOE: BUNDLED}), STANDINGS, 3)
    assert max(map(len, lines)) < 1024, "the agent cuts lines at 4096"
    assert not any("\n" in line for line in lines)
    found = [kernels(f"(EngineCore pid=1) INFO 11-23 15:02:11 [active.py:71] {line}") for line in lines]
    assert [one and (one[0], one[1].op, one[1].provider) for one in found] == [
        (3, op, BUNDLED if op is Op.MOE else STOCK) for op in Op
    ]
    assert found[0] is not None
    standings = {one.provider: (one.slowness, (one.excluded or "")[:19]) for one in found[0][1].standings}
    assert standings == {BUNDLED: (1.0, ""), "marlin": (1.28, ""), "deep_gemm": (None, "t1: ValueError: no ")}
