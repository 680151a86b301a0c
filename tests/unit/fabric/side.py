"""One member of test_proof inside its namespace: `MemberFabric` as the agent uses it.

Requests for statuses go through files, because the path between the members may be the broken one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

from aiohttp import web

from dsv4_runtime.agent import http
from dsv4_runtime.agent.decide.events import Done, Task, TaskFailed
from dsv4_runtime.agent.member import Member
from dsv4_runtime.agent.processes import Child
from dsv4_runtime.contract import (
    FabricPlan,
    FabricStatus,
    GroupPlan,
    HealthPolicy,
    Timeouts,
)
from dsv4_runtime.fabric.member import FabricError, MemberFabric
from dsv4_testkit.documents import group_plan


def plan(addresses: list[str]) -> GroupPlan:
    return group_plan(
        addresses,
        timeouts=Timeouts(preflight=20, staging=60, formation=60, load=1, first_token=1, drain=3),
        health=HealthPolicy(gpus=False),
        fabric=FabricPlan(seconds=60, min_bandwidth=1e9),
    )


async def as_agent(group: GroupPlan, rank: int, directory: Path) -> None:
    """Run the agent's tasks up to the proof: preflight, its HTTP API, the other agent's status, the proof."""
    member = Member(group, rank, directory, "token")
    runner = web.AppRunner(http.application(member, "token"), access_log=None)
    await runner.setup()
    assert await member.start.preflight() == Done(Task.PREFLIGHT)
    await web.TCPSite(runner, member.context.me.address, member.context.me.ports.agent).start()
    asking = asyncio.create_task(member.context.peers.run())
    proved = await member.start.prove()
    error = proved.message if isinstance(proved, TaskFailed) else None
    status = member.status().fabric
    assert status is not None
    await together(directory, rank)
    asking.cancel()
    await runner.cleanup()
    found = {"error": error, "proved": status.proved, "socket": member.context.env.get("NCCL_SOCKET_IFNAME")}
    print(json.dumps({**found, "notes": status.notes}))


async def together(directory: Path, rank: int) -> None:
    """Wait until the other side has finished too, because it may still send requests."""
    done = [directory / f"done{one}" for one in (0, 1)]
    done[rank].touch()
    for _ in range(3000):
        if all(path.exists() for path in done):
            break
        await asyncio.sleep(0.05)


async def main() -> None:
    rank, how = int(sys.argv[1]), json.loads(sys.argv[2])
    group = plan(how["addresses"])
    if how.get("agent"):
        await as_agent(group, rank, Path(how["directory"]))
        return
    assert group.fabric is not None
    fabric = MemberFabric(group, group.fabric, rank, "token")
    mine, theirs = (Path(how["directory"]) / f"status{one}.json" for one in (rank, 1 - rank))

    async def publish() -> None:
        while True:
            fresh = mine.with_suffix(".new")
            fresh.write_text(fabric.status.to_json())
            fresh.rename(mine)
            await asyncio.sleep(0.1)

    def others() -> dict[int, FabricStatus | None]:
        with contextlib.suppress(FileNotFoundError):
            return {1 - rank: FabricStatus.model_validate_json(theirs.read_text())}
        return {1 - rank: None}

    error = cause = None
    publishing = None
    try:
        await fabric.open()
        publishing = asyncio.create_task(publish())
        await fabric.prove(others)
        if how.get("measure"):
            log = Path(how["directory"]) / f"fabric{rank}.log"
            await fabric.measure(others, lambda name, command: Child.start(name, command, os.environ, log), log)
    except FabricError as failed:
        error, cause = str(failed), failed.cause
    await together(Path(how["directory"]), rank)
    if publishing is not None:
        publishing.cancel()
    fabric.close()
    status = fabric.status.to_dict()
    print(
        json.dumps(
            {
                "error": error,
                "cause": cause,
                "proved": status["proved"],
                "notes": status["notes"],
                "rails": status["rails"],
                "env": {variable.name: variable.value for variable in fabric.variables},
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main())
