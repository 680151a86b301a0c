"""What is checked of a machine beside its ports: limits, kernel, MTU."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines import RDMA, Machine, check, outcome, seen, spark

from dsv4_runtime.contract import FabricPlan
from dsv4_runtime.fabric.checks import CheckReason, CheckStatus, choose_fabric, failures, run_checks
from dsv4_runtime.fabric.node import discover_node, roce_mtu


@pytest.mark.parametrize(
    ("memlock", "capabilities", "level"),
    [("8388608", 0, CheckStatus.FAIL), ("8388608", 1 << 14, CheckStatus.OK), ("unlimited", 0, CheckStatus.OK)],
)
def test_locked_memory(tmp_path: Path, memlock: str, capabilities: int, level: CheckStatus) -> None:
    _, checks = seen(spark(memlock=memlock, capabilities=capabilities), tmp_path / "m")
    reason = CheckReason.LOCKED_MEMORY_LIMIT if level is CheckStatus.FAIL else None
    assert outcome(checks, "memlock") == (level, reason, None if memlock == "unlimited" else int(memlock))
    assert bool(check(checks, "memlock").remedy) is (level is CheckStatus.FAIL)


def test_locked_memory_without_rdma_and_without_a_word(tmp_path: Path) -> None:
    _, checks = seen(Machine(memlock="8388608"), tmp_path / "m", FabricPlan())
    assert check(checks, "memlock").level is CheckStatus.SKIPPED
    root = spark().build(tmp_path / "m")
    (root / "proc/self/limits").unlink()
    node = discover_node(root)
    assert check(list(run_checks(node, choose_fabric(node), RDMA)), "memlock").level is CheckStatus.SKIPPED


@pytest.mark.parametrize(
    ("release", "cmdline", "cma", "level"),
    [
        ("7.0.0-1019-nvidia", "ro quiet", (131_072, 9_800_000), CheckStatus.FAIL),
        ("7.0.0-1019-nvidia", "ro kho=off", (131_072, 9_800_000), CheckStatus.OK),
        ("7.0.0-31-generic", "ro", (131_072, 100_000), CheckStatus.WARN),
        ("6.17.0-1032-nvidia", "ro", (131_072, 9_800_000), CheckStatus.OK),
        ("7.0.0-1019-nvidia", "ro", None, CheckStatus.WARN),
    ],
)
def test_kexec_handover(
    tmp_path: Path, release: str, cmdline: str, cma: tuple[int, int] | None, level: CheckStatus
) -> None:
    _, checks = seen(spark(release=release, cmdline=cmdline, cma=cma), tmp_path / "m")
    found = check(checks, "kernel")
    reason = None if level is CheckStatus.OK else CheckReason.KERNEL_RESERVES_MEMORY
    assert outcome(checks, "kernel") == (level, reason, release)
    assert ("kho=off" in found.remedy) is (level is not CheckStatus.OK)


def test_open_files(tmp_path: Path) -> None:
    checks = seen(spark(nofile="1024"), tmp_path / "m")[1]
    assert outcome(checks, "nofile") == (CheckStatus.WARN, CheckReason.OPEN_FILES_LIMIT, 1024)


def test_the_plan_s_mtu(tmp_path: Path) -> None:
    machine = spark()
    machine.cards[1].mtu = 1500
    _, checks = seen(machine, tmp_path / "m", FabricPlan(mtu=9000))
    assert outcome(failures(checks), "mtu") == (CheckStatus.FAIL, CheckReason.MTU_BELOW_PLAN, 1500)


@pytest.mark.parametrize(("mtu", "payload"), [(9000, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (300, 0)])
def test_roce_mtu(mtu: int, payload: int) -> None:
    assert roce_mtu(mtu) == payload


@pytest.mark.parametrize(
    ("kinds", "level"),
    [(("DMA-FQ", "DMA"), CheckStatus.WARN), (("identity", "identity"), None), (("DMA",), None), ((None, None), None)],
)
def test_translated_gpus(tmp_path: Path, kinds: tuple[str | None, ...], level: CheckStatus | None) -> None:
    root = Machine().build(tmp_path / "m")
    for number, kind in enumerate(kinds):
        device = root / f"sys/bus/pci/devices/0000:{number + 1:02}:00.0"
        (device / "iommu_group").mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030000\n")
        if kind is not None:
            (device / "iommu_group/type").write_text(f"{kind}\n")
    node = discover_node(root)
    found = [one for one in run_checks(node, choose_fabric(node), FabricPlan()) if one.name == "peer to peer"]
    assert [one.level for one in found] == ([] if level is None else [level])
    assert all("0000:01:00.0" in one.found and "NCCL_P2P_DISABLE" in one.remedy for one in found)
