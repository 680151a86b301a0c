"""Flags and variables with effects beyond their deployment need the administrator's consent on a cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4_operator.api import ClusterPolicy, Finding, parse
from dsv4_operator.api.documents import security_markdown, security_tables
from dsv4_operator.api.policy import PolicyError, parse_policy, violations
from dsv4_operator.api.security import FLAGS, flag_reason, owned_env, owned_flag, variable_reason
from dsv4_operator.planning.images import profiles

ROOT = Path(__file__).parents[3]
KNOWN = {flag for profile in profiles() for flag in profile.surface.flags}
TELLING = re.compile(
    r"path|file|plugin|-cls|dir|server|endpoint|trust|origin|credential|chat-template|remote|modules|loras|transfer|ssl|cert|"
    r"loader|grpc|middleware|log-requests|log-outputs|events|download|profiler|processors"
)
REVIEWED = {
    "--chat-template-content-format", "--default-chat-template-kwargs", "--disable-access-log-for-endpoints",
    "--disable-log-requests", "--enable-moe-shared-loras", "--enable-server-load-tracking", "--enable-ssl-refresh",
    "--fully-sharded-loras",
    "--lora-target-modules", "--max-cpu-loras", "--max-loras", "--max-lora-cls-labels",
    "--mm-encoder-fp8-scale-save-margin", "--ssl-cert-reqs",
    "--ssl-ciphers",
}  # fmt: skip
"""Flags with words of `FLAGS` in their name that neither read or load files nor send data."""
CODE = (
    "PYTHONSTARTUP", "PYTHONBREAKPOINT", "PYTHONINSPECT", "PYTHONUSERBASE", "LD_AUDIT", "LD_LIBRARY_PATH",
    "GCONV_PATH",
    "BASH_ENV", "ENV", "PERL5LIB", "NODE_OPTIONS", "JAVA_TOOL_OPTIONS", "GLIBC_TUNABLES", "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_CONF_FILE", "RAY_START_HOOK",
    "RAY_RUNTIME_ENV_HOOK",
    "RAY_JOB_RUNTIME_ENV", "RAY_JEMALLOC_LIB_PATH", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH", "TRITON_CACHE_DIR",
    "CC", "CXX",
    "CUDA_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "NVSHMEM_BOOTSTRAP_PLUGIN", "UCX_MODULE_DIR",
    "GIT_SSH_COMMAND",
    "DG_JIT_NVCC_COMPILER", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_NCCL_SO_PATH", "VLLM_LOGGING_CONFIG_PATH",
    "VLLM_SERVER_DEV_MODE", "VLLM_CONFIG_ROOT", "VLLM_RPC_BASE_PATH", "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_USAGE_STATS_SERVER", "VLLM_DP_MASTER_IP", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "OTEL_EXPORTER_OTLP_ENDPOINT", "MALLOC_TRACE", "TMPDIR",
    "XDG_CONFIG_HOME",
    "TRANSFORMERS_CACHE", "HF_HOME", "HF_MODULES_CACHE", "HF_HUB_TRUST_REMOTE_CODE", "USER", "SHELL", "IFS",
)  # fmt: skip
HARMLESS = (
    "OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL", "VLLM_USE_DEEP_GEMM", "NCCL_DEBUG", "NCCL_IB_TIMEOUT",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_SOCKET_NTHREADS", "RAY_gcs_server_request_timeout_seconds", "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "HF_HUB_OFFLINE",
    "HF_ENDPOINT",
    "TOKENIZERS_PARALLELISM", "TZ", "LC_ALL", "VLLM_KV_CACHE_LAYOUT", "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD",
    "VLLM_USE_B12X_MOE", "MALLOC_ARENA_MAX", "TRITON_INTERPRET", "VLLM_USE_DEEP_GEMM_E8M0",
)  # fmt: skip


def refused(policy: ClusterPolicy | None = None, **engine: Any) -> list[Finding]:
    manifest = yaml.safe_load((ROOT / "examples" / "flash-2x-spark.yaml").read_text())
    manifest["metadata"]["namespace"] = "team"
    manifest["spec"]["engine"] = {**manifest["spec"].get("engine", {}), **engine}
    allowed = {"host_network_namespaces": ("team",), **(policy.model_dump() if policy else {})}
    policy = ClusterPolicy(**{**allowed, "host_network_namespaces": ("team",)})
    return list(violations(parse(manifest), policy, "own:1"))


def test_every_flag_of_the_table_is_one_of_vllm_and_not_dsv4s() -> None:
    assert set(FLAGS) <= KNOWN
    assert [flag for flag in FLAGS if owned_flag(flag)] == []


def test_every_flag_that_may_reach_further_is_in_the_table_or_reviewed() -> None:
    telling = {flag for flag in KNOWN if TELLING.search(flag) and not owned_flag(flag)}
    assert telling - set(FLAGS) - REVIEWED == set()


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_a_flag_is_refused_unless_the_administrator_allows_it(flag: str) -> None:
    (found,) = refused(extraArgs=[f"{flag}=hunter2"])
    assert (found.field, found.value, found.reason) == ("spec.engine.extraArgs[0]", flag, "EngineFlag")
    assert FLAGS[flag] in found.message
    assert "policy.engineFlags" in found.remedy
    assert "hunter2" not in repr(found)
    assert refused(ClusterPolicy(engine_flags=(flag,)), extraArgs=[f"{flag}=x"]) == []
    assert refused(ClusterPolicy(any_image_namespaces=("team",)), extraArgs=[flag]) == []
    assert flag_reason(flag.replace("-", "_").replace("__", "--", 1), ())


@pytest.mark.parametrize("name", CODE)
def test_a_variable_is_refused_unless_the_administrator_allows_it(name: str) -> None:
    assert variable_reason(name, ())
    (found,) = refused(env=[{"name": name, "value": "hunter2"}])
    assert (found.field, found.value, found.reason) == ("spec.engine.env[0].name", name, "EngineVariable")
    assert "policy.engineVariables" in found.remedy
    assert "hunter2" not in repr(found)
    assert refused(ClusterPolicy(engine_variables=(name,)), env=[{"name": name, "value": "x"}]) == []
    assert refused(ClusterPolicy(engine_variables=("*",)), env=[{"name": name, "value": "x"}]) == []


@pytest.mark.parametrize("name", HARMLESS)
def test_settings_of_the_engine_are_free(name: str) -> None:
    assert variable_reason(name, ()) is None


def test_variables_that_load_code_are_owned() -> None:
    assert all(map(owned_env, ("LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "PATH", "HOME", "VLLM_PLUGINS")))


def test_settings_of_the_profiles_need_no_consent() -> None:
    for profile in profiles():
        assert [name for name in (*profile.env, *profile.extra_env) if variable_reason(name, ())] == []
        assert [flag for flag in profile.args if flag_reason(flag, ())] == []


def test_the_chart_and_the_page_have_the_same_table() -> None:
    file = ROOT / "charts" / "dsv4-operator" / "files" / "security.json"
    wanted = json.dumps(security_tables(), indent=2, ensure_ascii=False) + "\n"
    assert file.read_text() == wanted, (
        "python -m dsv4_operator.api.documents security > charts/dsv4-operator/files/security.json"
    )
    assert security_markdown() in (ROOT / "docs" / "trust.md").read_text(), (
        "python -m dsv4_operator.api.documents trust"
    )


@pytest.mark.parametrize("data", [{"engineFlags": ["-x"]}, {"engineFlags": ["*"]}, {"engineVariables": ["A B"]}])
def test_a_policy_names_flags_and_variables(data: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        parse_policy(json.dumps(data))
