"""vLLM flags and environment variables that dsv4 sets itself, and which field to use instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_NO_FIELD = "remove it"

_FLAGS = {
    "--model": "use spec.model.source",
    "--served-model-name": "use spec.model.servedNames",
    "--revision": "use spec.model.source.huggingFace.revision",
    "--tensor-parallel-size": "use spec.topology.tensorParallelSize",
    "--pipeline-parallel-size": "use spec.topology.pipelineParallelSize",
    **dict.fromkeys(
        (
            "--data-parallel-size",
            "--data-parallel-size-local",
            "--data-parallel-address",
            "--data-parallel-backend",
            "--data-parallel-rank",
            "--data-parallel-start-rank",
            "--data-parallel-rpc-port",
            "--data-parallel-supervisor-port",
            "--data-parallel-external-lb",
            "--no-data-parallel-external-lb",
            "--data-parallel-hybrid-lb",
            "--no-data-parallel-hybrid-lb",
            "--data-parallel-multi-port-external-lb",
        ),
        "use spec.replicas for more engines",
    ),
    "--decode-context-parallel-size": _NO_FIELD,
    "--prefill-context-parallel-size": _NO_FIELD,
    "--max-model-len": "use spec.engine.maxModelLen",
    "--max-num-seqs": "use spec.engine.maxNumSeqs",
    "--max-num-batched-tokens": "use spec.engine.maxNumBatchedTokens",
    "--gpu-memory-utilization": "use spec.engine.gpuMemoryUtilization",
    "--device-memory-utilization": "use spec.engine.gpuMemoryUtilization",
    "--kv-cache-memory-bytes": "use spec.engine.kvCacheMemory",
    "--kv-cache-dtype": "use spec.engine.kvCacheDtype",
    "--async-scheduling": "use spec.engine.asyncScheduling",
    "--no-async-scheduling": "use spec.engine.asyncScheduling",
    "--enable-expert-parallel": "use spec.topology.expertParallel",
    "--no-enable-expert-parallel": "use spec.topology.expertParallel",
    "--disable-expert-parallel": "use spec.topology.expertParallel",
    "--speculative-config": "use spec.engine.speculative",
    "--spec-method": "use spec.engine.speculative.method",
    "--spec-model": "use spec.engine.speculative",
    "--spec-tokens": "use spec.engine.speculative.tokens",
    "--port": "use spec.network.ports.api",
    "--host": _NO_FIELD,
    "--uds": _NO_FIELD,
    "--root-path": _NO_FIELD,
    "--block-size": _NO_FIELD,
    "--distributed-executor-backend": "use spec.engine.executor",
    "--nnodes": "use spec.topology.nodesPerGroup",
    "--node-rank": _NO_FIELD,
    "--master-addr": _NO_FIELD,
    "--master-port": _NO_FIELD,
    "--headless": _NO_FIELD,
    "--api-server-count": _NO_FIELD,
    "--config": "write its flags into spec.engine.extraArgs",
    "--api-key": "use spec.gateway.apiKeys.secretKeyRef",
    "--hf-token": "use spec.model.source.huggingFace.secretKeyRef",
}
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-sc": "--speculative-config",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-asc": "--api-server-count",
}
OTHER_FLAGS = ("-ac", "-cc", "-dc", "-q", "--reasoning-parser")
"""Flags of vLLM that are what they are, although a flag that is looked for begins like them."""
_ENV = {
    "VLLM_HOST_IP": _NO_FIELD,
    "VLLM_HOST_PORT": _NO_FIELD,
    "VLLM_PORT": _NO_FIELD,
    "VLLM_PLUGINS": _NO_FIELD,
    "VLLM_CPU_KVCACHE_SPACE": "use spec.engine.kvCacheMemory",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "use spec.engine.timeouts.executeModel",
    "VLLM_ENGINE_READY_TIMEOUT_S": "use spec.engine.timeouts.load",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": _NO_FIELD,
    "CUDA_VISIBLE_DEVICES": "use spec.topology.devicesPerNode",
    "GLOO_SOCKET_IFNAME": _NO_FIELD,
    "NCCL_HOSTID": _NO_FIELD,
    "NCCL_SOCKET_IFNAME": _NO_FIELD,
    "NCCL_IB_HCA": "use spec.network.fabric.members[].hcas",
    "NCCL_IB_GID_INDEX": "use spec.network.fabric.members[].gidIndex",
    "TP_SOCKET_IFNAME": _NO_FIELD,
    "UCX_NET_DEVICES": "use spec.network.fabric.members[].hcas",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "use spec.engine.executor",
    "RAY_CGRAPH_get_timeout": "use spec.engine.timeouts.executeModel",
    "RAY_CGRAPH_submit_timeout": "use spec.engine.timeouts.executeModel",
    "RAY_ADDRESS": _NO_FIELD,
    "RAY_AUTH_MODE": _NO_FIELD,
    "RAY_AUTH_TOKEN": _NO_FIELD,
    "RAY_AUTH_TOKEN_PATH": _NO_FIELD,
    "RAY_NODE_IP_ADDRESS": _NO_FIELD,
    "RAY_OVERRIDE_NODE_IP_ADDRESS": _NO_FIELD,
    "LD_PRELOAD": _NO_FIELD,
    "PATH": _NO_FIELD,
    "HOME": _NO_FIELD,
    "PYTHONPATH": _NO_FIELD,
    "PYTHONHOME": _NO_FIELD,
}


def owned_flags() -> tuple[str, ...]:
    """Return the flags of vLLM that dsv4 sets itself."""
    return (*_FLAGS, *_SHORT)


def owned_variables() -> tuple[str, ...]:
    """Return the environment variables that dsv4 sets itself, beside all that begin with `DSV4_`."""
    return tuple(_ENV)


def flag_among(arg: str, flags: Iterable[str], others: Collection[str] = OTHER_FLAGS) -> str | None:
    """Return the flag of `flags` that `arg`, one word of vLLM's command line, sets; None if it sets none of them.

    vLLM's parser takes `_` for `-`, `--flag=value`, `--flag.key value`, any beginning of a flag, and a value right
    after a flag of one letter (`-n2`); all of these are found. `among` is the same in CEL.

    Args:
        arg: the word.
        flags: names of flags, with their dashes.
        others: flags that are not looked for, written in full, although one of `flags` begins like them.
    """
    if not arg.startswith("-"):
        return None
    flag = arg.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if flag in others:
        return None
    found = [known for known in flags if known.startswith(flag) or (len(known) == 2 and flag.startswith(known))]
    return flag if flag in found else next(iter(found), None)


def among(arg: str, flags: str, others: str) -> str:
    """Return the condition of CEL that `flag_among` is: whether the text `arg` sets one of the list `flags`."""
    parts = f"{arg}.split('=', 2)[0].split('.', 2)[0].replace('_', '-')"
    return (
        f"{arg}.startsWith('-') && [{parts}].exists(flag, !(flag in {others}) && {flags}.exists(known, "
        "known.startsWith(flag) || (size(known) == 2 && flag.startsWith(known))))"
    )


def owned_flag(arg: str) -> str | None:
    """Return the remedy if `arg`, one word of vLLM's command line, sets something that is dsv4's; None otherwise."""
    found = flag_among(arg, owned_flags())
    if found is None:
        return None
    flag = arg.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if found.startswith("--") and flag != found:
        return f"write flags in full if you meant another one than {found}"
    return _FLAGS[_SHORT.get(found, found)]


def owned_env(name: str) -> str | None:
    """Return the remedy if the environment variable `name` is dsv4's; None if it is not."""
    if name.startswith("DSV4_"):
        return _NO_FIELD
    return _ENV.get(name)
