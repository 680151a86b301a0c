"""Flags, environment variables and URLs that a specification may not contain.

Three sets of rules:

* Flags and variables that dsv4 sets itself (`owned_flag`, `owned_env`); each has the field to use instead.
* Flags and variables that reach beyond their deployment. A deployment may not run its own image unless the
  administrator allows it, so no other setting may load code into the engine, make it read files of the pod for clients,
  or send data to another host. `FLAGS` are refused unless `policy.engineFlags` lists them. Variables are accepted
  if `policy.engineVariables` lists them, or if they match `VARIABLES` and not `REFUSED_VARIABLES`, because every
  library in the image can read variables. `dsv4 up` accepts all of them: the engine has the rights of the user who
  starts it.
* URLs of link-local addresses and of cloud metadata services. Members fetch URLs from the network of their node and
  report errors, so a URL must not reach a service that only nodes may access. Names are checked as text; network
  policies have to restrict the addresses that they resolve to.

The chart enforces the second and the third set in CEL, from the tables of `api.documents`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache
from typing import Annotated

from dsv4_operator.api.values import Matches

_NO_FIELD = "remove it"

_OWNED_FLAGS = {
    "--model": "use spec.model.source",
    "--served-model-name": "use spec.model.servedNames",
    "--revision": "use spec.model.source.huggingFace.revision",
    "--tensor-parallel-size": "use spec.topology.tensorParallelSize",
    "--pipeline-parallel-size": "use spec.topology.pipelineParallelSize",
    **dict.fromkeys(
        (
            "--data-parallel-size", "--data-parallel-size-local", "--data-parallel-address",
            "--data-parallel-backend", "--data-parallel-rank", "--data-parallel-start-rank",
            "--data-parallel-rpc-port", "--data-parallel-supervisor-port", "--data-parallel-external-lb",
            "--no-data-parallel-external-lb", "--data-parallel-hybrid-lb", "--no-data-parallel-hybrid-lb",
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
    **dict.fromkeys(("--host", "--uds", "--root-path", "--block-size"), _NO_FIELD),
    "--distributed-executor-backend": "use spec.engine.executor",
    "--nnodes": "use spec.topology.nodesPerGroup",
    **dict.fromkeys(("--node-rank", "--master-addr", "--master-port", "--headless", "--api-server-count"), _NO_FIELD),
    "--config": "write its flags into spec.engine.extraArgs",
    "--api-key": "use spec.gateway.apiKeys.secretKeyRef",
    "--hf-token": "use spec.model.source.huggingFace.secretKeyRef",
}  # fmt: skip
_SHORT = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local", "-dpa": "--data-parallel-address", "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb", "-dph": "--data-parallel-hybrid-lb",
    "-dpm": "--data-parallel-multi-port-external-lb", "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port", "-dpr": "--data-parallel-start-rank",
    "-dcp": "--decode-context-parallel-size", "-pcp": "--prefill-context-parallel-size",
    "-ep": "--enable-expert-parallel", "-sc": "--speculative-config", "-n": "--nnodes", "-r": "--node-rank",
    "-asc": "--api-server-count",
}  # fmt: skip
OTHER_FLAGS = ("-ac", "-cc", "-dc", "-q", "--reasoning-parser")
"""Flags of vLLM that are prefixes of an owned flag, but distinct flags."""
_OWNED_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "use spec.engine.kvCacheMemory",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "use spec.engine.timeouts.executeModel",
    "VLLM_ENGINE_READY_TIMEOUT_S": "use spec.engine.timeouts.load",
    "CUDA_VISIBLE_DEVICES": "use spec.topology.devicesPerNode",
    "NCCL_IB_HCA": "use spec.network.fabric.members[].hcas",
    "NCCL_IB_GID_INDEX": "use spec.network.fabric.members[].gidIndex",
    "UCX_NET_DEVICES": "use spec.network.fabric.members[].hcas",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "use spec.engine.executor",
    "RAY_CGRAPH_get_timeout": "use spec.engine.timeouts.executeModel",
    "RAY_CGRAPH_submit_timeout": "use spec.engine.timeouts.executeModel",
    **dict.fromkeys(
        (
            "VLLM_HOST_IP", "VLLM_HOST_PORT", "VLLM_PORT", "VLLM_PLUGINS", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
            "GLOO_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "RAY_ADDRESS",
            "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_NODE_IP_ADDRESS",
            "RAY_OVERRIDE_NODE_IP_ADDRESS", "LD_PRELOAD", "PATH", "HOME", "PYTHONPATH", "PYTHONHOME",
        ),
        _NO_FIELD,
    ),
}  # fmt: skip


def owned_flags() -> tuple[str, ...]:
    """Return the flags of vLLM that dsv4 sets itself."""
    return (*_OWNED_FLAGS, *_SHORT)


def owned_variables() -> tuple[str, ...]:
    """Return the environment variables that dsv4 sets itself, besides those with the prefix `DSV4_`."""
    return tuple(_OWNED_VARIABLES)


def flag_among(arg: str, flags: Iterable[str], others: Collection[str] = OTHER_FLAGS) -> str | None:
    """Return the flag of `flags` that `arg`, one word of vLLM's command line, sets; None if it sets none of them.

    vLLM's parser accepts `_` for `-`, `--flag=value`, `--flag.key value`, any prefix of a flag, and a value directly
    after a flag of one letter (`-n2`); all of these are found. `among` is the same in CEL.

    Args:
        arg: the word.
        flags: names of flags, with their dashes.
        others: full names of other flags that are prefixes of one of `flags`.
    """
    if not arg.startswith("-"):
        return None
    flag = arg.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if flag in others:
        return None
    found = [known for known in flags if known.startswith(flag) or (len(known) == 2 and flag.startswith(known))]
    return flag if flag in found else next(iter(found), None)


def among(arg: str, flags: str, others: str) -> str:
    """Return `flag_among` as a CEL condition: whether the text `arg` sets one of the list `flags`."""
    parts = f"{arg}.split('=', 2)[0].split('.', 2)[0].replace('_', '-')"
    return (
        f"{arg}.startsWith('-') && [{parts}].exists(flag, !(flag in {others}) && {flags}.exists(known, "
        "known.startsWith(flag) || (size(known) == 2 && flag.startsWith(known))))"
    )


def owned_flag(arg: str) -> str | None:
    """Return the remedy if `arg`, one word of vLLM's command line, sets a flag owned by dsv4; None otherwise."""
    found = flag_among(arg, owned_flags())
    if found is None:
        return None
    flag = arg.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if found.startswith("--") and flag != found:
        return f"write the full flag unless you mean {found}"
    return _OWNED_FLAGS[_SHORT.get(found, found)]


def owned_env(name: str) -> str | None:
    """Return the remedy if dsv4 owns the environment variable `name`; None otherwise."""
    if name.startswith("DSV4_"):
        return _NO_FIELD
    return _OWNED_VARIABLES.get(name)


_CODE = "loads code"
_FILE = "names a file or a directory to read, write or load"
_NETWORK = "opens a port, or sends data to another host"
_CLIENTS = "enables requests that the gateway does not support"
_PROMPTS = "writes prompts or answers into logs or to another host"

FLAGS: dict[str, str] = {
    **dict.fromkeys(
        (
            "--code-revision", "--hf-config-path", "--io-processor-plugin", "--log-config-file", "--logging-config",
            "--logits-processors", "--middleware", "--model-class-overrides", "--reasoning-parser-plugin",
            "--scheduler-cls", "--tool-parser-plugin", "--trust-remote-code", "--worker-cls", "--worker-extension-cls",
        ),
        _CODE,
    ),
    **dict.fromkeys(
        (
            "--allowed-local-media-path", "--chat-template", "--default-mm-loras", "--download-dir",
            "--generation-config", "--lora-modules", "--mm-encoder-fp8-scale-path", "--mm-encoder-fp8-scale-save-path",
            "--model-loader-extra-config", "--profiler-config", "--ssl-ca-certs", "--ssl-certfile", "--ssl-keyfile",
            "--tokenizer", "--tokenizer-revision",
        ),
        _FILE,
    ),
    **dict.fromkeys(
        (
            "--ec-manager-config", "--ec-transfer-config", "--enable-scale-out", "--fault-tolerance-config", "--grpc",
            "--grpc-port", "--kv-events-config", "--kv-transfer-config", "--otlp-traces-endpoint", "--tool-server",
            "--weight-transfer-config",
        ),
        _NETWORK,
    ),
    **dict.fromkeys(
        (
            "--allow-credentials", "--allowed-headers", "--allowed-methods", "--allowed-origins", "--enable-elastic-ep",
            "--enable-mm-embeds", "--enable-offline-docs", "--enable-prompt-embeds", "--enable-tokenizer-info-endpoint",
            "--enable-trace-replay", "--h11-max-header-count", "--h11-max-incomplete-event-size", "--tokens-only",
            "--trust-request-chat-template", "--trust-request-mm-kwargs",
        ),
        _CLIENTS,
    ),
    **dict.fromkeys(
        ("--collect-detailed-traces", "--enable-log-deltas", "--enable-log-outputs", "--enable-log-requests"), _PROMPTS
    ),
}  # fmt: skip
"""Flags that need the administrator's consent, with the reason."""

VARIABLES: dict[str, str] = {
    r"(VLLM|NCCL|RAY|TRITON)_\w+": "vLLM, NCCL, Ray and Triton",
    r"(FLASHINFER|DG|DEEP_GEMM|B12X|TILELANG|CUTE_DSL)_\w+": "kernels",
    r"(CUBLAS|CUDA|CUDNN|NVSHMEM|UCX|GLOO)_\w+": "libraries of the device and of the fabric",
    r"(TORCH|TORCHINDUCTOR|PYTORCH|SAFETENSORS|INSTANTTENSOR)_\w+": "PyTorch, and the loading of weights",
    r"(OMP|MKL|KMP|OPENBLAS|NUMEXPR)_\w+": "threads of the libraries of the processor",
    r"HF_HUB_(OFFLINE|DISABLE_\w+|ENABLE_HF_TRANSFER|ETAG_TIMEOUT|DOWNLOAD_TIMEOUT)|HF_XET_\w+|TRANSFORMERS_OFFLINE": (
        "the client of the Hub"
    ),
    r"HF_ENDPOINT": "a mirror of the Hub, except link-local addresses",
    r"MALLOC_(ARENA|MMAP|TRIM|TOP)_\w+": "the allocator of the C library",
    r"TZ|LANG|LC_\w+|NO_COLOR|FORCE_COLOR|VERBOSE|MAX_JOBS|NVCC_THREADS|TOKENIZERS_PARALLELISM": "locale, threads",
    r"PYTHON(UNBUFFERED|FAULTHANDLER|HASHSEED)": "Python, without loading code",
}
"""Patterns of the whole names of accepted variables, with the programs that read them."""

REFUSED_VARIABLES: dict[str, str] = {
    r"\w+_(PATHS?|DIRS?|FOLDER|FILE|HOME|ROOT|BASE|OUT|LIB|SO)(_\w+)?|VLLM_(ASSETS|MEDIA)_CACHE": _FILE,
    r"\w+_(PLUGINS?|HOOKS?|RUNTIME_ENV|\w*PICKLE|COMPILER|AUTOLOAD|CONNECTOR)(_\w+)?": _CODE,
    r"TRITON_\w*OVERRIDE\w*|VLLM_(USE_RUST_FRONTEND|USE_MODELSCOPE|ALLOW_INSECURE_SERIALIZATION)": _CODE,
    r"(VLLM|RAY|TRITON|TORCH|UCX|NVSHMEM|GLOO)_(\w+_)?(URLS?|HOST|IPS?|ADDRESS|PORT|SERVER|TLS|CERT)(_\w+)?": _NETWORK,
    r"NCCL_COMM_ID": _NETWORK,
    r"VLLM_(ALLOW_RUNTIME_LORA_UPDATING|LORA_RESOLVER_\w+|SERVER_DEV_MODE|ENABLE_RESPONSES_API_STORE)": _CLIENTS,
    r"VLLM_(SKIP_MODEL_NAME_VALIDATION|RAY_EXTRA_ENV_VAR\w+)": _CLIENTS,
    r"VLLM_(DEBUG_LOG_API_SERVER_RESPONSE|REQUEST_BODY_LOG_LEVEL|TRACE_FUNCTION)": _PROMPTS,
}
"""Patterns of the names of refused variables, with the reason; they override `VARIABLES`."""


def spellings(flag: str) -> tuple[str, ...]:
    """Return the spellings of `flag` and of its negation in vLLM."""
    bare = flag.removeprefix("--").removeprefix("enable-")
    return (flag, f"--no-{flag.removeprefix('--')}", *((f"--disable-{bare}",) if flag.startswith("--enable-") else ()))


@cache
def _refused(allowed: tuple[str, ...]) -> dict[str, str]:
    return {spelling: flag for flag in FLAGS if flag not in allowed for spelling in spellings(flag)}


def flag_reason(arg: str, allowed: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the refused flag that `arg`, one word of vLLM's command line, sets, with the reason; None if it is
    accepted.

    Args:
        arg: in any notation of vLLM's parser (`flag_among`).
        allowed: flags allowed by the administrator.
    """
    refused = _refused(allowed)
    found = flag_among(arg, refused, (*OTHER_FLAGS, *allowed))
    return (refused[found], FLAGS[refused[found]]) if found is not None else None


def variable_reason(name: str, allowed: tuple[str, ...]) -> str | None:
    """Return the reason why the environment variable `name` is refused; None if it is accepted."""
    if name in allowed or "*" in allowed:
        return None
    for pattern, reason in REFUSED_VARIABLES.items():
        if re.fullmatch(pattern, name, re.ASCII):
            return reason
    known = any(re.fullmatch(pattern, name, re.ASCII) for pattern in VARIABLES)
    return None if known else "is not known to be harmless"


_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_PORT = r"(:(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3}))?"
_LABEL = r"[A-Za-z0-9_]([\w-]*[A-Za-z0-9_])?"
# No number in any notation: programs accept 2852039166, 0xa9.0xfe.43518 and 0251.254.43518 as addresses.
_LAST_LABEL = r"([A-Za-z_]([\w-]*\w)?|[1-9][0-9]*[A-Za-z_-]([\w-]*\w)?|0[0-9]*[A-WYZa-wyz_-]([\w-]*\w)?)"
_NAME = rf"({_LABEL}\.)*{_LAST_LABEL}\.?"
# Routed or private addresses. All other prefixes are local, mapped or translated.
_V6 = r"\[(::1|([23][0-9A-Fa-f]{3}|[Ff][CcDd][0-9A-Fa-f]{2})(:[0-9A-Fa-f]{0,4}){2,7})\]"

_AT = r"(?i)://([^/\s]*@)?"
_END = r"\.?([:/?#\s\"',;]|$)"
LINK_LOCAL = (
    rf"{_AT}(169\.254\.|(168\.63\.129\.16|100\.100\.100\.200|192\.0\.0\.192|metadata(\.google)?(\.internal)?|metadata\."
    rf"(goog|azure\.(internal|com)|tencentyun\.com|packet\.net)|instance-data(\.ec2\.internal)?){_END})",
    # The same as one number, in other bases, with fewer numbers, and within IPv6 addresses.
    rf"{_AT}((0x[0-9a-f]+|[0-9]{{8,}}|(0+251|0x0*a9|169)\.(254|0+376|0x0*fe|[0-9]{{4,}}|0x[0-9a-f]{{3,}})(\.[0-9a-fx]+)*)"
    rf"{_END}|\[([0:]*(f{{4}}:)?(a9fe:|169\.254\.)|fe[89ab]|0*64:f+9b:|2002:0*a9fe:|fd00:0*ec2:))",
)
"""Patterns of a text that contains a URL with such a host."""
LINK_LOCAL_SHORT = r"(?i)://([^/\s]*@)?(169\.254\.|metadata\.google|\[fe[89ab]|\[::(ffff:)?(a9fe|169))"
"""The most common of them, because API servers limit the total cost of a definition's rules. The policy of the chart
contains the complete patterns."""
LINK_LOCAL_REFUSAL = "names a link-local address or the metadata service of a cloud; write the host of a store"

URL = Matches(
    # Host and path only: user, query and fragment may contain secrets.
    rf"https?://({_NAME}|{_BYTE}(\.{_BYTE}){{3}}|{_V6}){_PORT}(/[!\"$->@-~]*)?",
    "is not a URL of a host and a path; begin it with https:// and a host name, and put secrets into a Secret "
    "and name it in secretKeyRef",
    shown=r"[\w.:/\[\]-]*",
    never=tuple((pattern, LINK_LOCAL_REFUSAL) for pattern in LINK_LOCAL),
)
Url = Annotated[str, URL]

ENDPOINT_VARIABLES = (
    "HF_ENDPOINT",
    "HF_INFERENCE_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "S3_ENDPOINT_URL",
)
"""Environment variables with the URL of a Hub or store; the rules of source URLs apply to them."""


def is_link_local(text: str) -> bool:
    """Return whether `text` contains a URL whose host is a link-local address or a cloud metadata service."""
    return any(re.search(pattern, text, re.ASCII) for pattern in LINK_LOCAL)
