"""Resolution of names in a plan with a real resolver; `localhost` resolves on every machine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsv4_runtime.agent.main import AddressError, names, replaced, resolve
from dsv4_runtime.contract import GroupPlan, MemberPlan, MemberPorts, Role

HEAD, WORKER = "nano-0-i1-r0.nano-0-i1.team.svc", "nano-0-i1-r10.nano-0-i1.team.svc"


def named(make_plan: Any, head: str = HEAD, worker: str = WORKER, **changes: Any) -> GroupPlan:
    members = (
        MemberPlan(
            rank=0,
            role=Role.HEAD,
            address=head,
            devices=1,
            ports=MemberPorts(agent=8090, gcs=6379, dashboard=8265, api=8000),
            ray_args=("start", f"--node-ip-address={head}", f"--dashboard-host={head}"),
            env={"VLLM_HOST_IP": head, "RAY_ADDRESS": f"{head}:6379"},
        ),
        MemberPlan(
            rank=1,
            role=Role.WORKER,
            address=worker,
            devices=1,
            ports=MemberPorts(agent=8090),
            ray_args=("start", f"--address={head}:6379", f"--node-ip-address={worker}"),
        ),
    )
    return make_plan(members=members, **changes)


def test_every_place_that_has_a_name_gets_its_address(make_plan: Any) -> None:
    plan = named(make_plan)
    assert names(plan) == {HEAD: 0, WORKER: 1}
    done = replaced(plan, {HEAD: "10.0.0.1", WORKER: "10.0.0.2"})
    assert [member.address for member in done.members] == ["10.0.0.1", "10.0.0.2"]
    assert done.members[1].ray_args == ("start", "--address=10.0.0.1:6379", "--node-ip-address=10.0.0.2")
    assert done.members[0].env == {"VLLM_HOST_IP": "10.0.0.1", "RAY_ADDRESS": "10.0.0.1:6379"}
    assert "svc" not in done.to_json()
    assert done.timeouts == plan.timeouts


async def test_a_plan_of_addresses_stays_as_it_is(make_plan: Any) -> None:
    plan = make_plan()
    assert await resolve(plan, 0, None) is plan


async def test_the_own_address_is_not_resolved(make_plan: Any) -> None:
    plan = named(make_plan, worker="localhost")
    done = await resolve(plan, 0, "10.1.2.3")
    assert [member.address for member in done.members] == ["10.1.2.3", "127.0.0.1"]


async def test_a_name_that_never_gets_an_address_is_waited_for_and_named(
    make_plan: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plan = named(make_plan, worker="nobody.invalid")
    timeouts = plan.timeouts.model_copy(update={"formation": 1.5})
    begun = time.monotonic()
    with caplog.at_level(logging.INFO), pytest.raises(AddressError, match=r"rank 1 \(nobody.invalid\)"):
        await resolve(plan.model_copy(update={"timeouts": timeouts}), 0, "10.0.0.1")
    assert time.monotonic() - begun > 1.4
    assert "waiting for the address of rank 1 (nobody.invalid)" in caplog.text


async def test_an_own_address_that_is_none_is_refused(make_plan: Any) -> None:
    with pytest.raises(AddressError, match="'fd00::1' is no IPv4 address"):
        await resolve(named(make_plan), 0, "fd00::1")


def test_the_agent_ends_on_sigterm_while_it_waits_for_a_name(make_plan: Any, tmp_path: Path) -> None:
    """A container's process 1 without a handler would ignore SIGTERM."""
    token = tmp_path / "token"
    token.write_text("secret")
    plan = named(make_plan, worker="nobody.invalid", ray_token_file=str(token))
    plan = plan.model_copy(update={"timeouts": plan.timeouts.model_copy(update={"formation": 300.0})})
    (tmp_path / "plan.json").write_text(plan.to_json())
    command = [sys.executable, "-m", "dsv4_runtime.agent.main", "--plan", str(tmp_path / "plan.json"), "--rank=0"]
    command += ["--directory", str(tmp_path / "deep" / "m0"), "--address=127.0.0.1"]
    with (tmp_path / "log").open("wb") as log:
        agent = subprocess.Popen(command, stderr=log, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        deadline = time.monotonic() + 120
        while "waiting for the address" not in (tmp_path / "log").read_text():
            assert agent.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) == 0
    finally:
        agent.kill()
        agent.wait(60)
    assert (tmp_path / "deep" / "m0").is_dir()


async def test_name_resolution_does_not_block_the_loop(make_plan: Any) -> None:
    plan = named(make_plan, worker="localhost")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(tick())
    await resolve(plan, 0, "10.0.0.1")
    task.cancel()
    assert ticks > 1
