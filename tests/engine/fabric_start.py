"""Child process of test_fabric_start, because it changes its network: two members of the nano model.

They start as with `dsv4 up`, with a fabric in their plan that only its discovery can fill. Takes the state directory,
prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import httpx

from dsv4_operator.api import DSV4Deployment, load
from dsv4_operator.backends.local import network
from dsv4_operator.backends.local.backend import LocalBackend
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.lifecycle.observed import Observed
from dsv4_operator.planning import plan_group
from dsv4_runtime.contract import FabricPlan, GroupPlan, Phase
from dsv4_runtime.engine import token_auth
from dsv4_testkit.supervised import Supervised

MANIFEST = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: nano}
spec:
  model: {variant: Nano, source: {nano: {seed: 0}}}
  topology: {hardware: CPU, nodesPerGroup: 2}
  engine: {maxModelLen: 1024, maxNumSeqs: 4, maxNumBatchedTokens: 512}
"""
START_SECONDS = 240.0
NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_IB_DISABLE")


def with_fabric(plan: GroupPlan) -> GroupPlan:
    members = tuple(
        member.model_copy(update={"env": {name: value for name, value in member.env.items() if name not in NAMES}})
        for member in plan.members
    )
    return plan.model_copy(update={"members": members, "fabric": FabricPlan(seconds=30, min_bandwidth=1e9)})


async def serving(backend: LocalBackend, deployment: DSV4Deployment) -> Observed:
    deadline = time.monotonic() + START_SECONDS
    while True:
        observed = await backend.observe(deployment, 0)
        phases = [member.status.phase if member.status else None for member in observed.members]
        if all(phase is Phase.SERVING for phase in phases):
            return observed
        if time.monotonic() > deadline or any(member.ended for member in observed.members):
            raise SystemExit(f"it did not start: {phases}, {[member.ended for member in observed.members]}")
        await asyncio.sleep(0.5)


def told(pid: int) -> dict[str, str]:
    words = (word.partition("=") for word in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return {name: value for name, _, value in words if name in NAMES}


async def main() -> None:
    state = DeploymentState(Path(sys.argv[1]), "nano")
    state.prepare()
    deployment = load(MANIFEST)
    supervised = Supervised()
    processes = supervised.again()
    processes.listen()
    backend = LocalBackend(state, processes, isolated=True, changed=lambda: None)
    plan = with_fabric(plan_group(deployment, await backend.facts(deployment), group=0, incarnation=1))
    try:
        await backend.ensure(deployment, plan)
        observed = await serving(backend, deployment)
        head = plan.head
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            body = {"model": "nano", "prompt": "Hello", "max_tokens": 4}
            headers = token_auth.headers(Path(plan.ray_token_file).read_text().strip())
            url = f"http://{head.address}:{head.ports.api}/v1/completions"
            answer = await client.post(url, json=body, headers=headers)
        members = [
            {
                "fabric": member.status.fabric.to_dict() if member.status and member.status.fabric else None,
                "told": {process.name: told(process.pid) for process in member.processes},
            }
            for member in observed.members
        ]
        print(json.dumps({"tokens": answer.json()["usage"]["completion_tokens"], "members": members}))
    finally:
        while not await backend.fence(deployment, 0, 1):
            await asyncio.sleep(0.1)
        await backend.close()
        await processes.close()
        supervised.close()


if __name__ == "__main__":
    try:
        network.enter_private_network()
    except network.NoNamespacesError as error:
        sys.exit(f"not here: {error}")
    asyncio.run(main())
