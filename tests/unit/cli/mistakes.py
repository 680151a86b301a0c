"""A hundred common mistakes in manifests, each as one change of a valid manifest, with words of the message.

`docs/mistakes.md` shows those whose number is in `SHOWN`, with the whole message.
"""

from __future__ import annotations

import copy
from typing import Any

GOOD: dict[str, Any] = {
    "apiVersion": "dsv4.dev/v1alpha1",
    "kind": "DSV4Deployment",
    "metadata": {"name": "flash"},
    "spec": {
        "model": {"variant": "Flash", "source": {"path": "/models/DeepSeek-V4-Flash-0731"}},
        "topology": {"hardware": "GB10", "nodesPerGroup": 2},
        "engine": {"maxModelLen": 131072, "maxNumSeqs": 8, "maxNumBatchedTokens": 4096},
    },
}
GONE = object()
HUB = {"repo": "deepseek-ai/DeepSeek-V4-Flash-0731", "revision": "9e165c30" * 5}
PRO = {"variant": "Pro", "source": {"path": "/models/DeepSeek-V4-Pro"}}

# Field, wrong value, and words of the message: the value and the remedy.
MISTAKES: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("apiVersion", "v1", ("apiVersion", "v1", "NotSupported")),
    ("apiVersion", GONE, ("apiVersion", None, "Required")),
    ("kind", "Deployment", ("kind", "Deployment", "NotSupported")),
    ("metadata", GONE, ("metadata", None, "Required")),
    ("metadata.name", GONE, ("metadata.name", None, "Required")),
    ("metadata.name", "Flash_1", ("metadata.name", "Flash_1", "InvalidValue")),
    ("metadata.name", "a" * 46, ("metadata.name", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "TooLong")),
    ("metadata.labels", ["a"], ("metadata.labels", "a list", "WrongType")),
    ("spec", GONE, ("spec", None, "Required")),
    ("spec", [], ("spec", "a list", "WrongType")),
    ("spec.model", GONE, ("spec.model", None, "Required")),
    ("spec.modle", {}, ("spec.modle", None, "UnknownField")),
    ("spec.model.variant", GONE, ("spec.model.variant", None, "Required")),
    ("spec.model.variant", "flash", ("spec.model.variant", "flash", "NotSupported")),
    ("spec.model.variant", "V4-Flash", ("spec.model.variant", "V4-Flash", "NotSupported")),
    ("spec.model.variant", "Pro", ("spec.model.variant", "Pro", "VariantMismatch")),
    ("spec.model.source", GONE, ("spec.model.source", None, "Required")),
    ("spec.model.source", {}, ("spec.model.source", None, "SourceCount")),
    ("spec.model.source", "/models/flash", ("spec.model.source", "/models/flash", "WrongType")),
    (
        "spec.model.source.path",
        "models/DeepSeek-V4-Flash",
        ("spec.model.source.path", "models/DeepSeek-V4-Flash", "InvalidValue"),
    ),
    (
        "spec.model.source.path",
        "/models/llama-3-70b",
        ("spec.model.source.path", "/models/llama-3-70b", "UnknownCheckpoint"),
    ),
    (
        "spec.model.source.path",
        "/models/DeepSeek-V4-Flash-AWQ",
        ("spec.model.source.path", "/models/DeepSeek-V4-Flash-AWQ", "UnknownCheckpoint"),
    ),
    ("spec.model.source.path", "/models/DeepSeek-V4-Pro", ("spec.model.variant", "Flash", "VariantMismatch")),
    ("spec.model.source.path", 5, ("spec.model.source.path", 5, "WrongType")),
    ("spec.model.source.paths", "/m", ("spec.model.source.paths", None, "UnknownField")),
    ("spec.model.source.nano", {"precision": "fp8"}, ("spec.model.source", None, "SourceCount")),
    (
        "spec.model.source",
        {"huggingFace": {"repo": HUB["repo"]}},
        ("spec.model.source.huggingFace.revision", None, "Required"),
    ),
    (
        "spec.model.source",
        {"huggingFace": {**HUB, "revision": "main"}},
        ("spec.model.source.huggingFace.revision", "main", "InvalidValue"),
    ),
    (
        "spec.model.source",
        {"huggingFace": {**HUB, "repo": "V4-Flash"}},
        ("spec.model.source.huggingFace.repo", "V4-Flash", "InvalidValue"),
    ),
    (
        "spec.model.source",
        {"huggingFace": {"revision": HUB["revision"]}},
        ("spec.model.source.huggingFace.repo", None, "Required"),
    ),
    (
        "spec.model.source",
        {"huggingFace": {**HUB, "endpoint": "hub"}},
        ("spec.model.source.huggingFace.endpoint", "hub", "InvalidValue"),
    ),
    ("spec.model.source", {"s3": {"bucket": "s3://b/x"}}, ("spec.model.source.s3.bucket", "s3://b/x", "InvalidValue")),
    (
        "spec.model.source",
        {"http": {"url": "https://u:p@h/V4-Flash"}},
        ("spec.model.source.http.url", None, "InvalidValue"),
    ),
    ("spec.model.source", {"sharedPath": "nfs"}, ("spec.model.source.sharedPath", "nfs", "InvalidValue")),
    ("spec.model.checkpoint", "V5-Flash", ("spec.model.checkpoint", "V5-Flash", "UnknownCheckpoint")),
    ("spec.model.tables", "ssd", ("spec.model.tables", "ssd", "NotSupported")),
    ("spec.model.tables", "disk", ("spec.model.tables", "disk", "TablesOnDisk")),
    ("spec.model.servedNames", "flash", ("spec.model.servedNames", "flash", "WrongType")),
    ("spec.model.servedNames", ["-x"], ("spec.model.servedNames[0]", "-x", "InvalidValue")),
    ("spec.model.staging", {"streams": 0}, ("spec.model.staging.streams", 0, "OutOfRange")),
    ("spec.model.staging", {"verify": "Always"}, ("spec.model.staging.verify", "Always", "NotSupported")),
    ("spec.topology.hardware", "rtxpro6000", ("spec.topology.hardware", "rtxpro6000", "NotSupported")),
    ("spec.topology.hardware", "DGX", ("spec.topology.hardware", "DGX", "NotSupported")),
    ("spec.topology.hardware", "gb10", ("spec.topology.hardware", "gb10", "NotSupported")),
    ("spec.topology.hardware", "CPU", ("spec.topology.hardware", "CPU", "HardwareVariant")),
    ("spec.topology.nodesPerGroup", 0, ("spec.topology.nodesPerGroup", 0, "OutOfRange")),
    ("spec.topology.nodesPerGroup", 17, ("spec.topology.nodesPerGroup", 17, "OutOfRange")),
    ("spec.topology.nodesPerGroup", "2", ("spec.topology.nodesPerGroup", "2", "WrongType")),
    ("spec.topology.nodesPerGroup", 2.5, ("spec.topology.nodesPerGroup", 2.5, "WrongType")),
    ("spec.topology.nodesPerGroup", 3, ("spec.topology.tensorParallelSize", 3, "TensorParallelDivision")),
    ("spec.topology.nodesPerGroup", 1, ("", None, "MemoryShort")),
    ("spec.topology.nodesPergroup", 2, ("spec.topology.nodesPergroup", None, "UnknownField")),
    ("spec.topology.devicesPerNode", 2, ("spec.topology.devicesPerNode", 2, "DevicesPerNode")),
    ("spec.topology.tensorParallelSize", 4, ("spec.topology.tensorParallelSize", 4, "TensorParallelSize")),
    ("spec.topology.pipelineParallelSize", 3, ("spec.topology.pipelineParallelSize", 3, "PipelineParallelSize")),
    ("spec.topology.expertParallel", "yes", ("spec.topology.expertParallel", "yes", "WrongType")),
    ("spec.topology.nodes", ["a", "a"], ("spec.topology.nodes[1]", "a", "Duplicate")),
    ("spec.engine.maxModelLen", 100, ("spec.engine.maxModelLen", 100, "OutOfRange")),
    ("spec.engine.maxModelLen", 2_000_000, ("spec.engine.maxModelLen", 2000000, "OutOfRange")),
    ("spec.engine.maxModelLen", "128k", ("spec.engine.maxModelLen", "128k", "WrongType")),
    ("spec.engine.maxmodellen", 1024, ("spec.engine.maxmodellen", None, "UnknownField")),
    ("spec.engine.maxNumSeqs", 0, ("spec.engine.maxNumSeqs", 0, "OutOfRange")),
    ("spec.engine.maxNumSeqs", 8000, ("spec.engine.maxNumSeqs", 8000, "OutOfRange")),
    ("spec.engine.maxNumBatchedTokens", 4, ("spec.engine.maxNumBatchedTokens", 4, "OutOfRange")),
    ("spec.engine.gpuMemoryUtilization", 80, ("spec.engine.gpuMemoryUtilization", 80, "OutOfRange")),
    ("spec.engine.gpuMemoryUtilization", "0.8", ("spec.engine.gpuMemoryUtilization", "0.8", "WrongType")),
    ("spec.engine.gpuMemoryUtilization", 0.98, ("spec.engine.gpuMemoryUtilization", 0.98, "MemoryUtilization")),
    ("spec.engine.gpuMemoryUtilization", 0.5, ("", None, "MemoryShort")),
    ("spec.engine.kvCacheMemory", "8 GB", ("spec.engine.kvCacheMemory", "8 GB", "InvalidValue")),
    ("spec.engine.kvCacheMemory", "64Gi", ("", None, "MemoryShort")),
    ("spec.engine.kvCacheMemory", "1Mi", ("", None, "MemoryShort")),
    ("spec.engine.kvCacheDtype", "fp4", ("spec.engine.kvCacheDtype", "fp4", "NotSupported")),
    ("spec.engine.kvCacheDtype", "nvfp4_ds_mla", ("spec.engine.kvCacheDtype", "nvfp4_ds_mla", "KVCacheDtype")),
    ("spec.engine.cudagraphMode", "none", ("spec.engine.cudagraphMode", "none", "NotSupported")),
    ("spec.engine.executor", "ray", ("spec.engine.executor", "ray", "NotSupported")),
    ("spec.engine.executor", "RayLegacy", ("spec.engine.executor", "RayLegacy", "Executor")),
    ("spec.engine.executor", "mp", ("spec.engine.executor", "mp", "NotSupported")),
    ("spec.engine.image", "My vLLM", ("spec.engine.image", "My vLLM", "InvalidValue")),
    (
        "spec.engine.image",
        "mine@sha256:" + "ab" * 32,
        ("spec.engine.image", "mine@sha256:ababababababababababababababababababababababa...", "UnknownImage"),
    ),
    ("spec.engine.profile", "vllm-0.9", ("spec.engine.profile", "vllm-0.9", "UnknownProfile")),
    ("spec.engine.profile", "rtx-b12x", ("spec.engine.profile", "rtx-b12x", "ImageHardware")),
    ("spec.engine.speculative", {"method": "dspark"}, ("spec.engine.speculative.method", "dspark", "NotSupported")),
    ("spec.engine.speculative", {"method": "MTP"}, ("spec.engine.speculative.method", "MTP", "SpeculativeHeads")),
    ("spec.engine.speculative", {"tokens": 5}, ("spec.engine.speculative.tokens", 5, "SpeculativeHeads")),
    ("spec.engine.extraArgs", "--seed 1", ("spec.engine.extraArgs", "--seed 1", "WrongType")),
    ("spec.engine.extraArgs", ["seed"], ("spec.engine.extraArgs[0]", "seed", "NoFlag")),
    ("spec.engine.extraArgs", ["--sead=1"], ("spec.engine.extraArgs[0]", "--sead", "UnknownArgument")),
    (
        "spec.engine.extraArgs",
        ["--max_modl_len", "5"],
        ("spec.engine.extraArgs[0]", "--max_modl_len", "UnknownArgument"),
    ),
    ("spec.engine.extraArgs", ["--max-model-len=9"], ("spec.engine.extraArgs[0]", "--max-model-len", "OwnedFlag")),
    ("spec.engine.extraArgs", ["--seed=x"], ("spec.engine.extraArgs[0]", "x", "UnknownArgument")),
    ("spec.engine.extraArgs", ["--kernel-config={"], ("spec.engine.extraArgs[0]", "{", "UnknownArgument")),
    (
        "spec.engine.extraArgs",
        ["--attention-backend=FLASHMLA_SPARSE"],
        ("spec.engine.extraArgs", None, "AttentionBackend"),
    ),
    (
        "spec.engine.env",
        [{"name": "VLLM_USE_B12X_MOE", "value": "1"}],
        ("spec.engine.env[0].name", "VLLM_USE_B12X_MOE", "UnknownVariable"),
    ),
    (
        "spec.engine.env",
        [{"name": "NCCL_BUFSIZE", "value": "1"}],
        ("spec.engine.env[0].name", "NCCL_BUFSIZE", "UnknownVariable"),
    ),
    ("spec.engine.env", [{"name": "NCCL_DEBUG", "value": ""}], ("spec.engine.env[0].value", "", "EmptyVariable")),
    (
        "spec.engine.env",
        [{"name": "RAY_ADDRESS", "value": "x"}],
        ("spec.engine.env[0].name", "RAY_ADDRESS", "OwnedVariable"),
    ),
    ("spec.engine.env", [{"name": "A", "value": 1}], ("spec.engine.env[0].value", 1, "WrongType")),
    ("spec.engine.timeouts", {"load": 90}, ("spec.engine.timeouts.load", 90, "InvalidValue")),
    ("spec.engine.timeouts", {"load": "0s"}, ("spec.engine.timeouts.load", "0s", "OutOfRange")),
    ("spec.network", {"ports": {"api": 8000, "gcs": 8000}}, ("spec.network.ports.gcs", 8000, "Duplicate")),
    ("spec.network", {"ports": {"gcs": 10500}}, ("spec.network.ports.gcs", 10500, "Ports")),
    ("spec.recovery", {"window": "0s"}, ("spec.recovery.window", "0s", "OutOfRange")),
    ("spec.topology.nodes", ["spark-1"], ("spec.topology.nodes", 1, "NodesMissing")),
)
SHOWN = (5, 20, 22, 27, 49, 50, 66, 76, 88, 92)
"""Numbers in `MISTAKES` that the page shows."""


def manifest(field: str, value: Any) -> dict[str, Any]:
    """Return the valid manifest with `value` at `field`; `GONE` removes the field."""
    document = copy.deepcopy(GOOD)
    place = document
    *outer, last = field.split(".")
    for name in outer:
        place = place.setdefault(name, {})
    if value is GONE:
        del place[last]
    else:
        place[last] = copy.deepcopy(value)
    return document
