"""The environment of a group's processes. docs/rendering.md says why each variable is there."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

from dsv4_operator.api import Executor
from dsv4_operator.planning.bounds import execute_model_seconds, fabric_plan, timeouts
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.members import Placement
from dsv4_operator.planning.setup import Setup

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

_UNIFIED = {
    # Page cache counts as used there, and Ray would end workers for it; the agent has a guard of its own.
    "RAY_memory_monitor_refresh_ms": "0",
    # Compilers that run beside the engine take from the same memory.
    "MAX_JOBS": "2",
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "256",
    # In every recipe that is known to work there, NVIDIA's own included.
    "NCCL_IGNORE_CPU_AFFINITY": "1",
}

_RAY = {
    # Its metrics have no token, so their ports stay shut: the raylets' own here, and the dashboard's by a number that
    # is no port (Ray says so in its log and goes on). The autoscaler's goes with `--no-monitor`.
    "RAY_enable_metrics_collection": "0",
    "DASHBOARD_METRIC_PORT": "-1",
    # A worker process that waits for the next engine has imported vLLM (`dsv4_runtime.agent.standby`).
    "RAY_preload_python_modules": "dsv4_runtime.vllm_plugin.preload",
}

_CACHES = {
    "DSV4_KERNELS_CACHE": "kernels",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TILELANG_CACHE_DIR": "tilelang",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Compiled kernels, by variable. DeepGEMM's are in vLLM's."""


def group_env(chosen: Setup) -> dict[str, str]:
    """Return the environment of every member."""
    rendered = {
        **_NO_TELEPHONE,
        **_RAY,
        **(_CPU if chosen.on_cpu else dict(_on_accelerators(chosen))),
        **dict(_caches(chosen)),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": chosen.facts.ray_token_file,
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(math.ceil(execute_model_seconds(chosen))),
    }
    return rendered | {variable.name: variable.value for variable in chosen.deployment.spec.engine.env}


def member_env(chosen: Setup, placement: Placement, head: Placement) -> dict[str, str]:
    """Return the environment of one member; it wins over the group's."""
    env = {"VLLM_HOST_IP": placement.node.address}
    if fabric_plan(chosen) is None and placement.node.interface:
        # Otherwise each agent sets what it finds: interface, RDMA devices and, where NCCL would choose wrongly, GID.
        env["GLOO_SOCKET_IFNAME"] = placement.node.interface
        if not chosen.on_cpu:
            env |= {"NCCL_SOCKET_IFNAME": f"={placement.node.interface}", "TP_SOCKET_IFNAME": placement.node.interface}
    if chosen.on_cpu and chosen.variable("OMP_NUM_THREADS") is None:
        env["OMP_NUM_THREADS"] = str(max(1, placement.node.cpus // placement.devices))
    if placement.node.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in placement.node.gpus)
    if chosen.facts.one_machine and not chosen.on_cpu:
        # NCCL would take members of one machine for processes of one host, which can share memory.
        env["NCCL_HOSTID"] = placement.node.name
    if placement is head:
        # vLLM joins this cluster and no other that may run on the machine.
        env["RAY_ADDRESS"] = f"{head.node.address}:{head.ports.gcs}"
    return env


def cache_directory(chosen: Setup, facts: Facts) -> str:
    """Return the directory of compiled kernels: those of another image or compute capability must never be loaded."""
    image = chosen.deployment.spec.engine.image or ""
    digest = image.rpartition("@sha256:")[2][:16] if "@sha256:" in image else ""
    tagged = hashlib.sha256(image.encode()).hexdigest()[:8] if image and not digest else ""
    key = "-".join(filter(None, (chosen.profile.name, digest or tagged, f"sm{chosen.machine.sm}")))
    return f"{facts.cache_root}/{key}"


def _on_accelerators(chosen: Setup) -> Iterator[tuple[str, str]]:
    executor = chosen.deployment.spec.engine.executor
    yield "DSV4_KERNELS", chosen.deployment.spec.engine.kernels
    # A team of threads for each of the tens of thousands of tensors costs more than copying them: on 16 cores 9,000
    # tensors loaded in 3.7 s, with one thread in 0.8 s. vLLM itself serves with one.
    yield "OMP_NUM_THREADS", "1"
    yield "VLLM_ENGINE_READY_TIMEOUT_S", str(math.ceil(timeouts(chosen).load))
    if chosen.machine.unified_memory:
        yield from _UNIFIED.items()
    if expandable_segments(chosen):
        yield "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
    if not chosen.several_machines:
        yield "NCCL_IB_DISABLE", "1"
    if executor is Executor.RAY_LEGACY:
        seconds = str(math.ceil(execute_model_seconds(chosen)))
        yield "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0"
        yield "RAY_CGRAPH_get_timeout", seconds
        yield "RAY_CGRAPH_submit_timeout", seconds
    if chosen.facts.cuda_home:
        yield "CUDA_HOME", chosen.facts.cuda_home
    # A spawned EngineCore, or worker of the MP executor, imports vLLM again, for 10 to 28 s of each start. A forked one
    # does not, and is safe where OpenMP has one thread: beside the main thread the API server then has ZeroMQ's alone,
    # whose contexts no child uses. A child cannot use CUDA if its parent did, so vLLM spawns it after all then
    # (`patch_forked_engine`). A fork server would be one more process with all of vLLM in memory.
    one_thread = chosen.variable("OMP_NUM_THREADS") in (None, "1")
    yield "VLLM_WORKER_MULTIPROC_METHOD", "fork" if one_thread else "spawn"
    yield from chosen.profile.env.items()


def _caches(chosen: Setup) -> Iterator[tuple[str, str]]:
    """Yield where compiled code is kept, on CPU too: what vLLM compiles there for its first token costs more than the
    rest of a start.
    """
    directory = cache_directory(chosen, chosen.facts)
    for name, folder in _CACHES.items():
        yield name, f"{directory}/{folder}"


def expandable_segments(chosen: Setup) -> bool:
    """Tell whether the allocator may map segments: graphs of vLLM's own all-reduce between devices of one machine
    cannot use such memory, unless the image has another all-reduce.
    """
    return chosen.deployment.spec.topology.devices_per_node == 1 or chosen.profile.expandable_segments
