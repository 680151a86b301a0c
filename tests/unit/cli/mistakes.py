"""A hundred mistakes that people make in a manifest, each as one change of a good one, with words of the answer.

`docs/mistakes.md` shows those whose number is in `SHOWN`, with the whole answer.
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

# Field, what is written there, and words that the answer has: the value and the remedy.
MISTAKES: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("apiVersion", "v1", ('"v1"', "write dsv4.dev/v1alpha1")),
    ("apiVersion", GONE, ("is required", "write apiVersion")),
    ("kind", "Deployment", ('"Deployment"', "write DSV4Deployment")),
    ("metadata", GONE, ("is required", "write metadata: with name:")),
    ("metadata.name", GONE, ("is required", "lower-case letters")),
    ("metadata.name", "Flash_1", ('"Flash_1"', "use lower-case letters")),
    ("metadata.name", "a" * 46, ("46 characters", "shorten it to 45")),
    ("metadata.labels", ["a"], ("a list", "write one NAME: VALUE a line")),
    ("spec", GONE, ("is required", "write spec: with model:")),
    ("spec", [], ("a list", "write its fields indented below it")),
    ("spec.model", GONE, ("is required", "write model: with variant:")),
    ("spec.modle", {}, ("unknown field", "did you mean model?")),
    ("spec.model.variant", GONE, ("is required", "Flash, Pro or Nano")),
    ("spec.model.variant", "flash", ('"flash"', "use one of Nano, Flash, Pro")),
    ("spec.model.variant", "V4-Flash", ('"V4-Flash"', "use one of")),
    ("spec.model.variant", "Pro", ("contradicts", "write Flash")),
    ("spec.model.source", GONE, ("is required", "write source: with path:")),
    ("spec.model.source", {}, ("is empty", "give exactly one of")),
    ("spec.model.source", "/models/flash", ('"/models/flash"', "write its fields indented")),
    ("spec.model.source.path", "models/DeepSeek-V4-Flash", ('"models/DeepSeek-V4-Flash"', "begin it with /")),
    ("spec.model.source.path", "/models/llama-3-70b", ('"/models/llama-3-70b"', "set spec.model.checkpoint")),
    (
        "spec.model.source.path",
        "/models/DeepSeek-V4-Flash-AWQ",
        ("is no checkpoint", "one of V4-Flash"),
    ),
    ("spec.model.source.path", "/models/DeepSeek-V4-Pro", ("contradicts", "write Pro")),
    ("spec.model.source.path", 5, ("5", "put it in quotes")),
    ("spec.model.source.paths", "/m", ("unknown field", "did you mean path?")),
    ("spec.model.source.nano", {"precision": "fp8"}, ("has nano and path", "give exactly one of")),
    ("spec.model.source", {"huggingFace": {"repo": HUB["repo"]}}, ("is required", "the 40 hex digits of the commit")),
    ("spec.model.source", {"huggingFace": {**HUB, "revision": "main"}}, ('"main"', "write all 40 hex digits")),
    ("spec.model.source", {"huggingFace": {**HUB, "repo": "V4-Flash"}}, ('"V4-Flash"', "write OWNER/NAME")),
    ("spec.model.source", {"huggingFace": {"revision": HUB["revision"]}}, ("is required", "repo: OWNER/NAME")),
    ("spec.model.source", {"huggingFace": {**HUB, "endpoint": "hub"}}, ('"hub"', "begin it with https://")),
    ("spec.model.source", {"s3": {"bucket": "s3://b/x"}}, ('"s3://b/x"', "write its name alone")),
    ("spec.model.source", {"http": {"url": "https://u:p@h/V4-Flash"}}, ("put secrets into a Secret", "secretKeyRef")),
    ("spec.model.source", {"sharedPath": "nfs"}, ('"nfs"', "begin it with /")),
    ("spec.model.checkpoint", "V5-Flash", ('"V5-Flash"', "use one of V4-Flash")),
    ("spec.model.tables", "ssd", ('"ssd"', "use one of memory, disk")),
    ("spec.model.tables", "disk", ("has none", "remove it")),
    ("spec.model.servedNames", "flash", ('"flash"', "write one entry a line")),
    ("spec.model.servedNames", ["-x"], ('"-x"', "write for example")),
    ("spec.model.staging", {"streams": 0}, ("0 is out of range", "the least is 1")),
    ("spec.model.staging", {"verify": "Always"}, ('"Always"', "use one of")),
    ("spec.topology.hardware", "rtxpro6000", ('"rtxpro6000"', "use one of")),
    ("spec.topology.hardware", "DGX", ('"DGX"', "use one of")),
    ("spec.topology.hardware", "gb10", ('"gb10"', "use one of")),
    ("spec.topology.hardware", "CPU", ("CPU is only for the variant Nano", "write GB10")),
    ("spec.topology.nodesPerGroup", 0, ("0 is out of range", "the least is 1")),
    ("spec.topology.nodesPerGroup", 17, ("17 is out of range", "the most is 16")),
    ("spec.topology.nodesPerGroup", "2", ('"2"', "without quotes")),
    ("spec.topology.nodesPerGroup", 2.5, ("2.5", "without a fraction")),
    ("spec.topology.nodesPerGroup", 3, ("3 cannot divide", "pipelineParallelSize 3")),
    ("spec.topology.nodesPerGroup", 1, ("the weights take", "topology.nodesPerGroup: 2")),
    ("spec.topology.nodesPergroup", 2, ("unknown field", "did you mean nodesPerGroup?")),
    ("spec.topology.devicesPerNode", 2, ("2 does not fit GB10", "write 1")),
    ("spec.topology.tensorParallelSize", 4, ("4 ×", "write 2, or leave it out")),
    ("spec.topology.pipelineParallelSize", 3, ("3 does not divide", "choose a divisor")),
    ("spec.topology.expertParallel", "yes", ('"yes"', "write one of them without quotes")),
    ("spec.topology.nodes", ["a", "a"], ('"a"', "remove one")),
    ("spec.engine.maxModelLen", 100, ("100 is out of range", "the least is 128")),
    ("spec.engine.maxModelLen", 2_000_000, ("2000000 is out of range", "the most is 1048576")),
    ("spec.engine.maxModelLen", "128k", ('"128k"', "a whole number")),
    ("spec.engine.maxmodellen", 1024, ("unknown field", "did you mean maxModelLen?")),
    ("spec.engine.maxNumSeqs", 0, ("0 is out of range", "the least is 1")),
    ("spec.engine.maxNumSeqs", 8000, ("8000 is out of range", "the most is 512")),
    ("spec.engine.maxNumBatchedTokens", 4, ("4", "the least is 64")),
    ("spec.engine.gpuMemoryUtilization", 80, ("80", "the most is 0.99")),
    ("spec.engine.gpuMemoryUtilization", "0.8", ('"0.8"', "without quotes")),
    ("spec.engine.gpuMemoryUtilization", 0.98, ("0.98 is more than 0.9", "lower it")),
    ("spec.engine.gpuMemoryUtilization", 0.5, ("0.5 of 121.69 GiB", "engine.gpuMemoryUtilization: 0.")),
    ("spec.engine.kvCacheMemory", "8 GB", ('"8 GB"', "512Mi or 8Gi")),
    ("spec.engine.kvCacheMemory", "64Gi", ("everything together takes", "engine.kvCacheMemory")),
    ("spec.engine.kvCacheMemory", "1Mi", ("kvCacheMemory is", "engine.kvCacheMemory")),
    ("spec.engine.kvCacheDtype", "fp4", ('"fp4"', "use one of")),
    ("spec.engine.kvCacheDtype", "nvfp4_ds_mla", ("nvfp4_ds_mla is not for", "use fp8")),
    ("spec.engine.cudagraphMode", "none", ('"none"', "use one of")),
    ("spec.engine.executor", "ray", ('"ray"', "use one of")),
    ("spec.engine.executor", "RayLegacy", ("RayLegacy is not part of the image", "use RayV2")),
    ("spec.engine.executor", "MP", ("MP with 2 machines", "write RayV2")),
    ("spec.engine.image", "My vLLM", ('"My vLLM"', "NAME@sha256:DIGEST")),
    ("spec.engine.image", "mine@sha256:" + "ab" * 32, ("no image profile describes", "spec.engine.profile")),
    ("spec.engine.profile", "vllm-0.9", ('"vllm-0.9" is unknown', "use one of")),
    ("spec.engine.profile", "rtx-b12x", ("is not built for GB10", "use another image")),
    ("spec.engine.speculative", {"method": "dspark"}, ('"dspark"', "use one of")),
    ("spec.engine.speculative", {"method": "MTP"}, ("has no heads for MTP", "write DSpark")),
    ("spec.engine.speculative", {"tokens": 5}, ("5 without a method", "write MTP or DSpark")),
    ("spec.engine.extraArgs", "--seed 1", ('"--seed 1"', "write one entry a line")),
    ("spec.engine.extraArgs", ["seed"], ('"seed"', "begin with one")),
    ("spec.engine.extraArgs", ["--sead=1"], ('"--sead" is unknown', "did you mean --seed?")),
    (
        "spec.engine.extraArgs",
        ["--max_modl_len", "5"],
        ('"--max_modl_len" is unknown', "did you mean --max-model"),
    ),
    ("spec.engine.extraArgs", ["--max-model-len=9"], ("is set by dsv4", "use spec.engine.maxModelLen")),
    ("spec.engine.extraArgs", ["--seed=x"], ('"x" is not a whole number', "write")),
    ("spec.engine.extraArgs", ["--kernel-config={"], ("is not JSON", "write for example")),
    ("spec.engine.extraArgs", ["--attention-backend=FLASHMLA_SPARSE"], ("FLASHMLA_SPARSE", "remove it, or write")),
    (
        "spec.engine.env",
        [{"name": "VLLM_USE_B12X_MOE", "value": "1"}],
        ("is unknown", "set spec.engine.profile"),
    ),
    (
        "spec.engine.env",
        [{"name": "NCCL_BUFSIZE", "value": "1"}],
        ('"NCCL_BUFSIZE"', "did you mean NCCL_BUFF"),
    ),
    ("spec.engine.env", [{"name": "NCCL_DEBUG", "value": ""}], ("NCCL_DEBUG is empty", "leave it out")),
    ("spec.engine.env", [{"name": "RAY_ADDRESS", "value": "x"}], ("is set by dsv4", "remove it")),
    ("spec.engine.env", [{"name": "A", "value": 1}], ("1 is not text", "put it in quotes")),
    ("spec.engine.timeouts", {"load": 90}, ("90 has no unit", "for example 90s")),
    ("spec.engine.timeouts", {"load": "0s"}, ("0s is out of range", "write 1ms to 8760h, for example 2m")),
    ("spec.network", {"ports": {"api": 8000, "gcs": 8000}}, ("8000", "choose another one")),
    ("spec.network", {"ports": {"gcs": 10500}}, ("10500 is among the ports that Ray gives", "choose another one")),
    ("spec.recovery", {"window": "0s"}, ("0s is out of range", "write 1ms to 8760h, for example 1h")),
)
SHOWN = (5, 20, 22, 27, 49, 50, 66, 76, 88, 92)
"""Numbers in `MISTAKES` that the page shows."""


def manifest(field: str, value: Any) -> dict[str, Any]:
    """Return the good manifest with `value` at `field`; `GONE` takes the field away."""
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
