"""`python -m dsv4_runtime.vllm_plugin.prestart GCS ADDRESS COUNT`: Ray worker processes in waiting for the next engine.

Ray gives an actor a worker process that is idle and has the actor's runtime environment; without one it starts one,
which then imports vLLM. This has the raylet start them while an engine serves, with the runtime environment of that
engine's workers. They are of no job, so that the next engine, which is another one, gets them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from dsv4_runtime.vllm_plugin.brake import slow_imports

ACTOR = "RayWorkerProc"
_SECONDS = 10.0
_KEEP_SECONDS = 365 * 86400


def waiting(environment: Mapping[str, str]) -> int:
    """Return how many idle worker processes of Ray have these variables."""
    found = 0
    for process in psutil.process_iter():
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::IDLE"):
                found += environment.items() <= process.environ().items()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Have `COUNT` processes wait on the node with `ADDRESS` of the cluster at `GCS`.

    Raises:
        SystemExit: no engine's workers are there to be like.
    """
    gcs, address, count = sys.argv[1:] if arguments is None else arguments
    with slow_imports():
        import grpc
        from ray import _raylet
        from ray.core.generated import common_pb2, gcs_pb2, node_manager_pb2, node_manager_pb2_grpc

    raylet: Any = _raylet
    options = raylet.GcsClientOptions.create(gcs, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True)
    state = raylet.GlobalStateAccessor(options)
    state.connect()
    actors = [gcs_pb2.ActorTableData.FromString(actor) for actor in state.get_actor_table(None, "ALIVE")]
    environments = {actor.serialized_runtime_env for actor in actors if actor.class_name.endswith(ACTOR)}
    ports = [
        node["NodeManagerPort"]
        for node in state.get_node_table()
        if node["Alive"] and node["NodeManagerAddress"] == address
    ]
    if len(environments) != 1 or len(ports) != 1:
        raise SystemExit(f"{len(environments)} runtime environments of {ACTOR}, {len(ports)} nodes at {address}")
    (environment,) = environments
    missing = int(count) - waiting(json.loads(environment or "{}").get("env_vars", {}))
    if missing <= 0:
        return
    request = node_manager_pb2.PrestartWorkersRequest(
        language=common_pb2.PYTHON, num_workers=missing, keep_alive_duration_secs=_KEEP_SECONDS
    )
    request.runtime_env_info.serialized_runtime_env = environment
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
    with grpc.insecure_channel(f"{address}:{ports[0]}") as channel:
        stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        stub.PrestartWorkers(request, timeout=_SECONDS, metadata=[("authorization", f"Bearer {token}")])
    print(f"{missing} worker processes of Ray import vLLM for the next engine")


if __name__ == "__main__":
    main()
