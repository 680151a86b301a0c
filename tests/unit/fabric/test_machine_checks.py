"""Checks of a machine besides its ports: limits, kernel, MTU."""

from __future__ import annotations

from pathlib import Path

import pytest
from machines import RDMA, Machine, check, outcome, seen, spark

from dsv4_runtime.contract import FabricPlan
from dsv4_runtime.fabric.checks import Check, CheckReason, CheckStatus, choose_fabric, failures, run_checks
from dsv4_runtime.fabric.node import discover_node, roce_mtu
from dsv4_runtime.util.peer_copies import redirected_copies


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


def config_space(capabilities: list[tuple[int, int]], *, loops: bool = False) -> bytes:
    """Return the configuration space of a bridge with these extended capabilities and words at their offset 6."""
    space = bytearray(4096)
    for place, (identity, control) in enumerate(capabilities):
        offset = 0x100 + 0x20 * place
        following = offset + 0x20 if place + 1 < len(capabilities) else 0x100 if loops else 0
        space[offset : offset + 4] = (identity | 1 << 16 | following << 20).to_bytes(4, "little")
        space[offset + 6 : offset + 8] = control.to_bytes(2, "little")
    return bytes(space)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    ("control", "level"),
    [(0x1D, CheckStatus.WARN), (0x04, CheckStatus.WARN), (0x08, CheckStatus.WARN), (0x11, None), (0, None)],
)
def test_redirecting_bridges(tmp_path: Path, place: int, control: int, level: CheckStatus | None) -> None:
    others = [(0x0001, 0xFFFF), (0x0019, 0xFFFF), (0x0002, 0xFFFF)]
    found = gpus_below(tmp_path, config_space([*others[:place], (0x000D, control), *others[place:]]))
    assert [one.level for one in found] == ([] if level is None else [level])
    assert all("0000:00:01.0" in one.found and "0000:00:02.0" not in one.found for one in found)


@pytest.mark.parametrize(
    ("config", "level"),
    [
        (b"\0" * 64, CheckStatus.SKIPPED),
        (None, CheckStatus.SKIPPED),
        (config_space([(0x0001, 0xFFFF), (0x0002, 0xFFFF)], loops=True), None),
        (b"\xff" * 4096, None),
        (b"\0" * 4096, None),
    ],
    ids=["user", "missing", "loop", "gone", "none"],
)
def test_bridges_without_acs(tmp_path: Path, config: bytes | None, level: CheckStatus | None) -> None:
    assert [one.level for one in gpus_below(tmp_path, config)] == ([] if level is None else [level])


def gpus_below(tmp_path: Path, config: bytes | None) -> list[Check]:
    """Return the findings for two GPUs below two bridges; the second bridge has no ACS."""
    root = Machine().build(tmp_path / "m")
    listed = root / "sys/bus/pci/devices"
    listed.mkdir(parents=True, exist_ok=True)
    for number, space in ((1, config), (2, config_space([]))):
        bridge = root / f"sys/devices/pci0000:00/0000:00:{number:02}.0"
        device = bridge / f"0000:{number:02}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030000\n")
        if space is not None:
            (bridge / "config").write_bytes(space)
        for path in (bridge, device):
            (listed / path.name).symlink_to(path)
    node = discover_node(root)
    return [one for one in run_checks(node, choose_fabric(node), FabricPlan()) if one.name == "peer to peer"]


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
    # The planner's facts without the rest of the machine.
    assert redirected_copies(root) == node.redirected
    assert bool(node.redirected) == bool(found)
