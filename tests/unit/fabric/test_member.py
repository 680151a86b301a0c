"""The agent's use of the fabric: refusals, environment of Ray and vLLM, result of the bandwidth probe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from machines import spark

from dsv4_runtime.agent.decide.events import TaskFailed
from dsv4_runtime.agent.member import Member
from dsv4_runtime.agent.start import PreflightError, preflight
from dsv4_runtime.contract import Cause, FabricPlan, FabricSetting, GroupPlan, MemberPlan
from dsv4_runtime.fabric.member import FabricError, MemberFabric
from dsv4_runtime.fabric.node import discover_node

sys.path.insert(0, str(Path(__file__).parent))
from side import plan as two_members

LOGS = Path(__file__).parent / "logs"


def alone(fabric: FabricPlan, **changes: Any) -> GroupPlan:
    group = two_members(["127.0.0.1", "127.0.0.2"])
    head: MemberPlan = group.head.model_copy(update=changes)
    want = group.expectations.model_copy(update={"world_size": 1})
    return group.model_copy(update={"members": (head,), "fabric": fabric, "expectations": want})


async def test_ray_and_vllm_get_the_fabrics_variables_and_the_plans_take_precedence(tmp_path: Path) -> None:
    group = alone(FabricPlan(), env={"GLOO_SOCKET_IFNAME": "mine"})
    member = Member(group, 0, tmp_path, "token")
    assert member.context.fabric is not None
    assert member.context.env.get("NCCL_SOCKET_IFNAME") is None
    await preflight(group, 0, member.context.fabric)
    try:
        await member.start.prove()
        assert member.context.env["NCCL_SOCKET_IFNAME"] == "=lo"
        assert member.context.env["GLOO_SOCKET_IFNAME"] == "mine"
        assert member.context.env["NCCL_DEBUG"] == "INFO"
        status = member.status().fabric
        assert status is not None
        assert status.proved
        assert status.rails[0].port is not None
    finally:
        member.context.fabric.close()


async def test_a_plan_without_a_fabric_changes_nothing(tmp_path: Path) -> None:
    member = Member(alone(FabricPlan()).model_copy(update={"fabric": None}), 0, tmp_path, "token")
    before = dict(member.context.env)
    await member.start.prove()
    assert member.context.env == before
    assert member.status().fabric is None


async def test_a_machine_without_required_rdma_is_refused(tmp_path: Path) -> None:
    if Path("/sys/class/infiniband").exists():
        pytest.skip("this machine has RDMA")
    fabric = FabricPlan(require_rdma=True)
    with pytest.raises(PreflightError, match="no RDMA device") as caught:
        await preflight(alone(fabric), 0, MemberFabric(alone(fabric), fabric, 0, "token"))
    assert caught.value.cause is Cause.FABRIC_DOWN


async def test_an_interface_set_by_hand_that_is_not_there(tmp_path: Path) -> None:
    fabric = FabricPlan(settings={0: FabricSetting(interface="qsfp9")})
    with pytest.raises(FabricError, match=r"the interface qsfp9 of spec\.network\.fabric is not here"):
        await MemberFabric(alone(fabric), fabric, 0, "token").open()


async def test_all_problems_are_reported_in_one_error(tmp_path: Path) -> None:
    fabric = FabricPlan(require_rdma=True)
    machine = spark(memlock="65536", release="7.0.0-1019-nvidia", cma=(1, 2))
    with pytest.raises(FabricError) as caught:
        await MemberFabric(alone(fabric), fabric, 0, "token").open(discover_node(machine.build(tmp_path / "m")))
    assert "kernel: 7.0.0-1019-nvidia" in str(caught.value)
    assert "kho=off" in str(caught.value)
    assert "memlock: 0.0625 MiB" in str(caught.value)


async def test_a_failed_proof_is_a_failure_of_the_member(tmp_path: Path) -> None:
    group = alone(FabricPlan()).model_copy(update={"members": two_members(["127.0.0.1", "127.0.0.2"]).members})
    bounds = group.timeouts.model_copy(update={"staging": 0.2, "formation": 0.2})
    member = Member(group.model_copy(update={"timeouts": bounds}), 0, tmp_path, "token")
    assert member.context.fabric is not None
    await member.context.fabric.open()
    try:
        found = await member.start.prove()
        assert isinstance(found, TaskFailed)
        assert (found.cause, found.message) == (Cause.FORMATION_TIMEOUT, "rank 1 did not come within 0 s")
    finally:
        member.context.fabric.close()


@pytest.mark.parametrize(
    ("log", "code", "rdma", "floor", "words", "cause"),
    [
        ("socket", 0, True, 1e9, "NCCL uses TCP sockets although", Cause.NCCL_SOCKET_FALLBACK),
        ("socket", 0, False, 21.875e9, r"moves 3\.63 GB/s, the floor is 21\.88 GB/s", Cause.FABRIC_DOWN),
        ("ibrequired", 1, True, 1e9, "NCCL finds no RDMA device although the kernel shows one", Cause.FABRIC_DOWN),
        ("ibrequired", 1, False, 1e9, r"failed \(exit code 1\): ", Cause.FABRIC_DOWN),
    ],
)
async def test_the_judgement_of_a_bandwidth_probe(
    log: str, code: int, rdma: bool, floor: float, words: str, cause: Cause
) -> None:
    fabric = FabricPlan(require_rdma=rdma, min_bandwidth=floor)
    found = MemberFabric(two_members(["127.0.0.1", "127.0.0.2"]), fabric, 0, "token")
    with pytest.raises(FabricError, match=words) as caught:
        found._evaluate(floor, code, (LOGS / f"nccl-2.28.9-{log}.log").read_text())
    assert caught.value.cause is cause


async def test_a_bandwidth_above_the_floor() -> None:
    fabric = FabricPlan(min_bandwidth=3e9)
    found = MemberFabric(alone(fabric), fabric, 0, "token")
    found._evaluate(3e9, 0, (LOGS / "nccl-2.28.9-socket.log").read_text())
    assert found.status.bandwidth == pytest.approx(3.628e9, rel=1e-3)
    assert found.status.transport == "Socket"


async def test_sockets_in_the_engine_s_own_log() -> None:
    fabric = FabricPlan(require_rdma=True)
    group = two_members(["127.0.0.1", "127.0.0.2"])
    found = MemberFabric(group, fabric, 0, "token")
    lines = (LOGS / "nccl-2.28.9-socket.log").read_text().splitlines()
    said = [text for line in lines if (text := found.engine_said(f"(RayWorkerProc pid=9) {line}"))]
    assert len(said) == 6
    assert "NCCL uses TCP sockets although the plan requires RDMA: (RayWorkerProc pid=9) vm:688:688" in said[0]
    assert found.status.transport == "Socket"
    # The next generation of the engine may use RDMA, and one member needs no network.
    assert found.engine_said("a:1:2 [0] NCCL INFO Using network IB") is None
    assert found.status.transport == "IB"
    single = MemberFabric(alone(fabric), fabric, 0, "token")
    assert not any(single.engine_said(line) for line in lines)


def test_the_plan_s_part_survives_the_wire() -> None:
    settings = {1: FabricSetting(interface="e0", hcas=("a",), gid_index=3), 0: FabricSetting()}
    group = alone(FabricPlan(require_rdma=True, mtu=9000, min_bandwidth=21.875e9, settings=settings))
    again = GroupPlan.model_validate_json(group.to_json())
    assert again == group
    assert again.fabric is not None
    assert again.fabric.setting(1).hcas == ("a",)
    assert again.fabric.setting(7) == FabricSetting()
