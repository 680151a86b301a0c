"""The environment of a group's processes."""

from __future__ import annotations

import math

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.members import Seat

_NO_TELEPHONE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Members have their weights before they start, and report to nobody."""

_CPU = {
    # vLLM's CPU platform under Ray, with the Triton kernels interpreted (dsv4_runtime.vllm_plugin).
    "DSV4_DEV_PLATFORM": "1",
    "TRITON_INTERPRET": "1",
    # Where this is set, importing vLLM takes three times as long in every process.
    "PYTHONDONTWRITEBYTECODE": "",
}


def group_env(deployment: DSV4Deployment, facts: Facts) -> dict[str, str]:
    """The environment of every member."""
    engine = deployment.spec.engine
    return {
        **_NO_TELEPHONE,
        **_CPU,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": facts.ray_token_file,
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(math.ceil(engine.timeouts.execute_model)),
        **{variable.name: variable.value for variable in engine.env},
    }


def member_env(deployment: DSV4Deployment, seat: Seat, head: Seat) -> dict[str, str]:
    """The environment of one member; it wins over the group's."""
    env = {
        "VLLM_HOST_IP": seat.node.address,
        "GLOO_SOCKET_IFNAME": seat.node.interface,
    }
    if "OMP_NUM_THREADS" not in {variable.name for variable in deployment.spec.engine.env}:
        env["OMP_NUM_THREADS"] = str(max(1, seat.node.cpus // seat.devices))
    if seat is head:
        # vLLM joins this cluster and no other that may run on the machine.
        env["RAY_ADDRESS"] = f"{head.node.address}:{head.ports.gcs}"
    return env
