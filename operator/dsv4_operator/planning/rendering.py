"""Command lines and environment of Ray and vLLM, and settings of the gateways. Reasons: docs/rendering.md."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Sequence

from dsv4_operator.api import CudagraphMode, DSV4Deployment, Executor, SpeculativeMethod
from dsv4_operator.planning.catalog import NANO
from dsv4_operator.planning.images.surface import read_arguments
from dsv4_operator.planning.setup import B12X_FLAGS, Placement, Setup, secret_file
from dsv4_runtime.contract import FabricPlan
from dsv4_runtime.contract.gateway import GatewaySettings
from dsv4_runtime.contract.kernels import B12X, Op

OBJECT_STORE_BYTES = 2**30
"""Object store of Ray on accelerators: shared memory, allocated as it fills; only compiled graphs use it."""

_LEAST_PREFILL = 1024
_SAFETENSORS = ("auto", "safetensors")
"""Load formats with a load strategy; `auto` is `safetensors` for a checkpoint of such files."""


def ray_args(chosen: Setup, member: Placement, head: Placement, incarnation: int) -> tuple[str, ...]:
    """Return the arguments after `ray` on the command line of `member`; none with `MP`, which needs no Ray."""
    facts = chosen.facts
    if chosen.spec.engine.executor is Executor.MP:
        return ()
    # In a network of its own also on loopback, because a port-forward arrives there.
    dashboard = "0.0.0.0" if facts.isolated and facts.own_networks else head.node.address  # noqa: S104  (token required)
    role = (
        (
            "--head",
            f"--port={head.ports.gcs}",
            f"--dashboard-host={dashboard}",
            f"--dashboard-port={head.ports.dashboard}",
            "--no-monitor",
        )
        if member is head
        else (f"--address={head.node.address}:{head.ports.gcs}",)
    )
    return (
        "start",
        "--block",
        *role,
        f"--node-ip-address={member.node.address}",
        f"--num-gpus={member.devices}",
        # Ray starts one idle Python process for each processor, and the engine requests devices only.
        f"--num-cpus={member.devices}",
        f"--object-store-memory={NANO.object_store_bytes if chosen.on_cpu else OBJECT_STORE_BYTES}",
        f"--temp-dir={facts.ray_root(incarnation, member.rank)}",
        "--disable-usage-stats",
        "--include-log-monitor=false",
    )


def engine_args(chosen: Setup, head: Placement, weights_path: str) -> tuple[str, ...]:
    """Return the arguments of vLLM that all members have in common."""
    deployment, engine = chosen.deployment, chosen.spec.engine
    return (
        f"--model={weights_path}",
        "--served-model-name",
        *deployment.served_names,
        f"--host={head.node.address}",
        f"--port={head.ports.api}",
        # Without an isolated network there is no gateway: clients send requests to vLLM itself.
        *(("--middleware=dsv4_runtime.engine.token_auth.TokenAuth",) if chosen.facts.isolated else ()),
        *_parallel(chosen),
        f"--block-size={chosen.model.block_tokens}",
        f"--max-model-len={chosen.memory.engine.max_model_len}",
        f"--max-num-seqs={engine.max_num_seqs}",
        f"--max-num-batched-tokens={engine.max_num_batched_tokens}",
        *(_on_cpu(chosen) if chosen.on_cpu else _on_accelerators(chosen)),
        *engine.extra_args,
    )


def member_engine_args(chosen: Setup, member: Placement, members: Sequence[Placement]) -> tuple[str, ...]:
    """Return the arguments of vLLM on `member` alone: its place among several members with `MP`."""
    if chosen.spec.engine.executor is not Executor.MP or len(members) == 1:
        return ()
    head = members[0]
    return (
        f"--nnodes={len(members)}",
        f"--node-rank={member.rank}",
        f"--master-addr={head.node.address}",
        # Without Ray its port is free, and the other members reach it.
        f"--master-port={head.ports.gcs}",
        *(() if member is head else ("--headless",)),
    )


def _parallel(chosen: Setup) -> Iterator[str]:
    topology, executor = chosen.spec.topology, chosen.spec.engine.executor
    if topology.world_size == 1:
        # vLLM's default: the engine process computes by itself, and Ray only lists the member.
        return
    yield f"--tensor-parallel-size={topology.tensor_parallel}"
    yield f"--pipeline-parallel-size={topology.pipeline_parallel_size}"
    yield f"--distributed-executor-backend={'mp' if executor is Executor.MP else 'ray'}"
    if topology.expert_parallel:
        yield "--enable-expert-parallel"


def _on_cpu(chosen: Setup) -> Iterator[str]:
    yield f"--kv-cache-memory-bytes={chosen.memory.engine.kv_cache_memory}"
    # Neither graphs nor compilation pay on CPU.
    yield "--enforce-eager"
    # Every prompt is computed, so that two answers to one prompt have the same tokens.
    yield "--no-enable-prefix-caching"
    yield from _speculative(chosen)


def _on_accelerators(chosen: Setup) -> Iterator[str]:
    engine = chosen.spec.engine
    yield f"--kv-cache-dtype={chosen.kv_cache_dtype}"
    yield f"--gpu-memory-utilization={chosen.utilization:g}"
    if engine.kv_cache_memory is not None:
        yield f"--kv-cache-memory-bytes={engine.kv_cache_memory}"
    yield "--async-scheduling" if chosen.memory.engine.async_scheduling else "--no-async-scheduling"
    if engine.cudagraph_mode is CudagraphMode.NONE:
        yield "--enforce-eager"
    yield from _speculative(chosen)
    for flag, value in _proposed(chosen):
        if value != "" and not chosen.gives(flag):
            yield f"{flag}={value}" if value is not None else flag


def _proposed(chosen: Setup) -> Iterator[tuple[str, str | None]]:
    """Yield the flags that the user's own arguments override.

    The model does not need a flag with an empty value; it is left out.
    """
    model, engine, profile = chosen.model, chosen.spec.engine, chosen.profile
    yield "--tokenizer-mode", model.tokenizer_mode
    yield "--reasoning-parser", model.reasoning_parser
    yield "--tool-call-parser", model.tool_call_parser
    yield "--enable-auto-tool-choice", None if model.tool_call_parser else ""
    yield "--enable-prefix-caching", None
    yield "--disable-custom-all-reduce", None if any(chosen.unsafe_copies) else ""
    yield from ((flag, B12X if chosen.provider(op) == B12X else "") for op, flag in B12X_FLAGS.items())
    yield "--load-format", chosen.memory.engine.load_format
    if chosen.memory.engine.load_format in _SAFETENSORS:
        yield "--safetensors-load-strategy", "prefetch"
    threshold = max(_LEAST_PREFILL, engine.max_num_batched_tokens // 2)
    if engine.max_num_seqs > 1 and threshold < engine.max_num_batched_tokens:
        yield "--long-prefill-token-threshold", str(threshold)
    if engine.cudagraph_mode is not CudagraphMode.NONE:
        # vLLM refuses a largest size that differs from the largest of the listed sizes.
        listed = chosen.json("--compilation-config").keys() & {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
        if not listed and not chosen.gives("--cudagraph-capture-sizes"):
            yield "--max-cudagraph-capture-size", str(engine.max_num_seqs * (1 + chosen.draft_tokens))
        if compilation := _compilation(chosen):
            yield "--compilation-config", compilation
    if chosen.memory.engine.tables_on_disk and profile.tables_on_disk:
        yield "--engram-config", _json(dict(profile.tables_on_disk))
    yield from ((flag, value) for flag, value in profile.args.items() if flag != "--load-format")


def _compilation(chosen: Setup) -> str:
    mode = chosen.spec.engine.cudagraph_mode
    settings = {**chosen.profile.compilation, **({} if mode is CudagraphMode.AUTO else {"cudagraph_mode": mode.name})}
    return _json(settings) if settings else ""


def _speculative(chosen: Setup) -> Iterator[str]:
    method = chosen.spec.engine.speculative.method
    if method is SpeculativeMethod.NONE:
        return
    settings = {"method": method.lower(), "num_speculative_tokens": chosen.draft_tokens}
    if method is SpeculativeMethod.DSPARK:
        # With vLLM's default, greedy, garbled answers and a lower acceptance were reported.
        settings |= {"draft_sample_method": "probabilistic", **chosen.profile.drafts}
    yield f"--speculative-config={_json(settings)}"


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


_OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Members have their weights before they start, and send no usage statistics."""

_CPU = {
    # vLLM's CPU platform under Ray, with the Triton kernels interpreted (dsv4_runtime.vllm_plugin).
    "DSV4_DEV_PLATFORM": "1",
    "TRITON_INTERPRET": "1",
    # If set, the import of vLLM takes three times as long in every process.
    "PYTHONDONTWRITEBYTECODE": "",
}

_UNIFIED = {
    # Ray counts the page cache as used memory and would kill workers for it; the agent has its own memory guard.
    "RAY_memory_monitor_refresh_ms": "0",
    # Compilers that run beside the engine use the same memory.
    "MAX_JOBS": "2",
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB": "256",
    # In every known working recipe, including NVIDIA's own.
    "NCCL_IGNORE_CPU_AFFINITY": "1",
}

_RAY = {
    # Ray's metrics need no token, so their ports stay closed: those of the raylets by this variable, that of the
    # dashboard by an invalid number (Ray logs it and continues), that of the autoscaler by `--no-monitor`.
    "RAY_enable_metrics_collection": "0",
    "DASHBOARD_METRIC_PORT": "-1",
    # Idle worker processes import vLLM before the next engine starts (`dsv4_runtime.agent.standby`).
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
"""Subdirectories for compiled kernels, by variable. DeepGEMM uses that of vLLM."""


def group_env(chosen: Setup, *, load_seconds: float, step_seconds: float) -> dict[str, str]:
    """Return the environment of every member.

    Args:
        chosen: the resolved settings.
        load_seconds: time limit of the load (`Timeouts.load`).
        step_seconds: time limit of one step of the engine.
    """
    seconds = str(math.ceil(step_seconds))
    caches = _cache_directory(chosen)
    rendered = {
        **_OFFLINE,
        **_RAY,
        **(_CPU if chosen.on_cpu else dict(_accelerator_env(chosen, load_seconds, seconds))),
        # On CPU too: the code that vLLM compiles there for its first token takes longer than the rest of a start.
        **{name: f"{caches}/{folder}" for name, folder in _CACHES.items()},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": chosen.facts.ray_token_file,
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": seconds,
    }
    return rendered | {variable.name: variable.value for variable in chosen.spec.engine.env}


def member_env(chosen: Setup, member: Placement, head: Placement, fabric: FabricPlan | None) -> dict[str, str]:
    """Return the environment of one member; it overrides that of the group."""
    node = member.node
    env = {"VLLM_HOST_IP": node.address}
    if fabric is None and node.interface:
        # Otherwise each agent detects interface and RDMA devices, and the GID where NCCL's choice would be wrong.
        env["GLOO_SOCKET_IFNAME"] = node.interface
        if not chosen.on_cpu:
            env |= {"NCCL_SOCKET_IFNAME": f"={node.interface}", "TP_SOCKET_IFNAME": node.interface}
    if chosen.on_cpu and chosen.variable("OMP_NUM_THREADS") is None:
        env["OMP_NUM_THREADS"] = str(max(1, node.cpus // member.devices))
    if node.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in node.gpus)
    if chosen.facts.one_machine and not chosen.on_cpu:
        # Otherwise NCCL treats members of one machine as processes of one host, which can share memory.
        env["NCCL_HOSTID"] = node.name
    if chosen.on_cpu and chosen.spec.engine.executor is Executor.MP:
        # vLLM would bind the workers of all members that share a machine to the same cores.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if member is head and chosen.spec.engine.executor is not Executor.MP:
        # vLLM joins this cluster, not another one on the machine.
        env["RAY_ADDRESS"] = f"{head.node.address}:{head.ports.gcs}"
    return env


def _cache_directory(chosen: Setup) -> str:
    """Return the directory of compiled kernels, by image and compute capability: others must never be loaded."""
    image = chosen.spec.engine.image or ""
    digest = image.rpartition("@sha256:")[2][:16] if "@sha256:" in image else ""
    tagged = hashlib.sha256(image.encode()).hexdigest()[:8] if image and not digest else ""
    key = "-".join(filter(None, (chosen.profile.name, digest or tagged, f"sm{chosen.machine.sm}")))
    return f"{chosen.facts.cache_root}/{key}"


def _accelerator_env(chosen: Setup, load_seconds: float, step_seconds: str) -> Iterator[tuple[str, str]]:
    engine, topology = chosen.spec.engine, chosen.spec.topology
    yield "DSV4_KERNELS", chosen.memory.engine.kernels
    if chosen.provider(Op.MOE) == B12X:
        # As the trial calls it: 16-bit activations.
        yield "VLLM_B12X_MOE_FP4_FORCE_A16", "1"
    # A team of threads for each of tens of thousands of tensors costs more than the copies: on 16 cores 9,000 tensors
    # loaded in 3.7 s, with one thread in 0.8 s. vLLM itself serves with one.
    yield "OMP_NUM_THREADS", "1"
    yield "VLLM_ENGINE_READY_TIMEOUT_S", str(math.ceil(load_seconds))
    if chosen.machine.unified_memory:
        yield from _UNIFIED.items()
    # Graphs of vLLM's own all-reduce between devices of one machine cannot use mapped segments, unless the image has
    # another all-reduce.
    if topology.devices_per_node == 1 or chosen.profile.expandable_segments:
        yield "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
    if not chosen.several_machines:
        yield "NCCL_IB_DISABLE", "1"
    if any(chosen.unsafe_copies):
        yield "NCCL_P2P_DISABLE", "1"
    if engine.executor is Executor.RAY_LEGACY:
        yield "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0"
        yield "RAY_CGRAPH_get_timeout", step_seconds
        yield "RAY_CGRAPH_submit_timeout", step_seconds
    if chosen.facts.cuda_home:
        yield "CUDA_HOME", chosen.facts.cuda_home
    # A spawned EngineCore, or worker of the MP executor, imports vLLM again, which takes 10 to 28 s of each start. A
    # forked one does not, and is safe if OpenMP has one thread: the API server then has only the main thread and those
    # of ZeroMQ, whose contexts no child uses. A child cannot use CUDA if its parent did, so vLLM spawns it in that case
    # (`patch_forked_engine`). A fork server would be one more process with all of vLLM in memory.
    one_thread = chosen.variable("OMP_NUM_THREADS") in (None, "1")
    yield "VLLM_WORKER_MULTIPROC_METHOD", "fork" if one_thread else "spawn"
    yield from chosen.profile.env.items()


_OTHER_CLIENT_BYTES = 128 * 2**20
"""Memory beside the bodies of held requests and of one that arrives: connections, answers, resumable streams."""


def gateway_settings(
    deployment: DSV4Deployment,
    *,
    drain_seconds: float,
    secrets_root: str,
    lame_duck_seconds: float = 5.0,
    service_url: str | None = None,
) -> GatewaySettings:
    """Return the settings of every gateway of `deployment`.

    Args:
        deployment: its specification contains the limits.
        drain_seconds: `spec.gateway.drain`, or less if the backend has less time.
        secrets_root: directory of the secrets that a `secretKeyRef` names.
        lame_duck_seconds: time from SIGTERM until it stops accepting; 0 if no endpoint has to be withdrawn.
        service_url: URL of the Service in front of all gateways; None: there is none.
    """
    spec = deployment.spec.gateway
    return GatewaySettings(
        served_names=model_names(deployment),
        hold_timeout_seconds=spec.hold_timeout,
        max_held_requests=spec.max_held_requests,
        max_held_bytes=spec.max_held_bytes,
        max_client_bytes=spec.max_held_bytes + spec.max_body_bytes + _OTHER_CLIENT_BYTES,
        request_timeout_seconds=spec.request_timeout,
        max_body_bytes=spec.max_body_bytes,
        drain_seconds=drain_seconds,
        lame_duck_seconds=lame_duck_seconds,
        service_url=service_url,
        api_keys_file=secret_file(spec.api_keys.secret_key_ref if spec.api_keys else None, secrets_root),
    )


def model_names(deployment: DSV4Deployment) -> tuple[str, ...]:
    """Return the names of the model in the API of `deployment`, and those of its adapters."""
    return (*deployment.served_names, *_adapters(deployment))


def _adapters(deployment: DSV4Deployment) -> Iterator[str]:
    """Yield the names of the adapters in `--lora-modules`, which are `NAME=PATH` or JSON with `name`."""
    for argument in read_arguments(deployment.spec.engine.extra_args):
        if argument.name.replace("_", "-") == "--lora-modules":
            for value in argument.values:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    yield str(json.loads(value)["name"]) if value.startswith("{") else value.partition("=")[0]
