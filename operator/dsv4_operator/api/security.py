"""Flags of vLLM and environment variables that reach beyond their deployment.

A writer of deployments may not run an image of their own unless the administrator allows it, so nothing else may bring
code into the engine, have it read files of the pod for clients, or send what it knows to another host. `FLAGS` are
refused unless `policy.engineFlags` names them. Of variables only `VARIABLES` without `REFUSED_VARIABLES`, and those of
`policy.engineVariables`, are taken, because what a variable does is up to every library in the image.

With `dsv4 up` all of them are free: the engine has the rights of the user who starts it. The chart has the same table
for the API server: `api.chart`.
"""

from __future__ import annotations

import re
from functools import cache

from dsv4_operator.api.owned import OTHER_FLAGS, flag_among

_CODE = "loads code"
_FILE = "names a file or a directory to read, write or load"
_NETWORK = "opens a port, or sends data to another host"
_CLIENTS = "lets clients do what the operator's gateway does not expect"
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
    r"HF_ENDPOINT": "a mirror of the Hub, where it is no link-local address",
    r"MALLOC_(ARENA|MMAP|TRIM|TOP)_\w+": "the allocator of the C library",
    r"TZ|LANG|LC_\w+|NO_COLOR|FORCE_COLOR|VERBOSE|MAX_JOBS|NVCC_THREADS|TOKENIZERS_PARALLELISM": "locale, threads",
    r"PYTHON(UNBUFFERED|FAULTHANDLER|HASHSEED)": "Python, where it loads nothing",
}
"""Names of variables that are taken, as patterns of the whole name, with what they are read by."""

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
"""Names of those that are refused all the same, with the reason."""


def spellings(flag: str) -> tuple[str, ...]:
    """Return the names that vLLM has for `flag` and its opposite."""
    bare = flag.removeprefix("--").removeprefix("enable-")
    return (flag, f"--no-{flag.removeprefix('--')}", *((f"--disable-{bare}",) if flag.startswith("--enable-") else ()))


@cache
def _refused(allowed: tuple[str, ...]) -> dict[str, str]:
    return {spelling: flag for flag in FLAGS if flag not in allowed for spelling in spellings(flag)}


def flag_reason(arg: str, allowed: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the flag that `arg`, one word of vLLM's command line, sets and may not, with the reason; None: it may.

    Args:
        arg: as it is written, in any of the ways that vLLM's parser reads (`flag_among`).
        allowed: flags that the administrator allows.
    """
    refused = _refused(allowed)
    found = flag_among(arg, refused, (*OTHER_FLAGS, *allowed))
    return (refused[found], FLAGS[refused[found]]) if found is not None else None


def variable_reason(name: str, allowed: tuple[str, ...]) -> str | None:
    """Return why the environment variable `name` may not be set; None if it may."""
    if name in allowed or "*" in allowed:
        return None
    for pattern, reason in REFUSED_VARIABLES.items():
        if re.fullmatch(pattern, name, re.ASCII):
            return reason
    known = any(re.fullmatch(pattern, name, re.ASCII) for pattern in VARIABLES)
    return None if known else "is not known to be harmless"
