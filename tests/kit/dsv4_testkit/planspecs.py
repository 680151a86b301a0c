"""Random deployments: a working one with up to three unusual values, for `plan.py` and the tests with hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dsv4_operator.planning.images import profiles

IMAGE = "vllm/vllm-openai:v0.33.0@sha256:" + "ab" * 32

# Hardware, model, machines, devices of each, pipeline stages: with sufficient memory for the model.
WORKING = (
    ("GB10", "Flash", 2, 1, 1),
    ("GB10", "Flash", 4, 1, 2),
    ("GB10", "Pro", 8, 1, 1),
    ("GB10", "Pro", 16, 1, 2),
    ("RTXPRO6000", "Flash", 1, 2, 1),
    ("RTXPRO6000", "Flash", 1, 4, 1),
    ("RTXPRO6000", "Flash", 2, 8, 2),
    ("RTXPRO6000", "Pro", 2, 8, 2),
    ("CPU", "Nano", 1, 1, 1),
    ("CPU", "Nano", 1, 2, 1),
    ("CPU", "Nano", 2, 1, 1),
)

CHECKPOINTS = {
    "Flash": ("V4-Flash", "V4-Flash", "V4-Flash-0731", "V4.1-Flash"),
    "Pro": ("V4-Pro", "V4-Pro", "V4-Pro-0813"),
    "Nano": ("V4-Nano",),
}

WORDS = ("--seed", "1", "--sed", "--moe-backend=marlin", "-cc.mode", "{", "--attention-config={", "--", "-x", "é", "")

# Fields below `spec` and unusual values: valid, refused by a rule, or beyond the memory.
ODDITIES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("engine.profile", (*(one.name for one in profiles()), "none")),
    ("engine.image", (IMAGE, "vllm/vllm-openai:latest", "own:1")),
    ("engine.executor", ("RayLegacy", "MP")),
    ("engine.maxModelLen", (128, 8192, 131_072, 1_048_576)),
    ("engine.maxNumSeqs", (1, 16, 17, 512)),
    ("engine.maxNumBatchedTokens", (64, 4096, 8192, 65_536)),
    ("engine.asyncScheduling", (False,)),
    ("engine.gpuMemoryUtilization", (0.1, 0.5, 0.8, 0.92, 0.99)),
    ("engine.kvCacheMemory", ("1Mi", "8Gi", "900Gi")),
    ("engine.kvCacheDtype", ("fp8", "fp8_ds_mla", "nvfp4_ds_mla")),
    ("engine.cudagraphMode", ("None", "Full", "FullAndPiecewise")),
    ("engine.speculative.method", ("MTP", "DSpark")),
    ("engine.speculative.tokens", (1, 5, 16)),
    ("engine.extraArgs", (*([word] for word in WORDS), ["--seed", "1", "--sed"], ["--moe-backend=marlin", "-x"])),
    ("engine.env", tuple([{"name": name, "value": ""}] for name in ("VLLM_X", "NCCL_DEBUG", "Q"))),
    ("network.ports.gcs", (6380, 10_100)),
    ("network.fabric.members", tuple([{"rank": rank, "gidIndex": 3}] for rank in (1, 15))),
    ("network.fabric.requireRDMA", (False, True)),
    ("topology.hardware", ("GB10", "RTXPRO6000", "CPU")),
    ("topology.nodesPerGroup", (1, 2, 3, 4, 8, 16)),
    ("topology.devicesPerNode", (1, 2, 4, 8)),
    ("topology.pipelineParallelSize", (2, 3, 4)),
    ("topology.expertParallel", (True,)),
    ("model.variant", ("Flash", "Pro", "Nano")),
    ("replicas", (0, 3)),
)

Choose = Callable[[Sequence[Any]], Any]
"""Random choice from a sequence."""


def manifest(choose: Choose) -> dict[str, Any]:
    """Return a deployment as in a file. Four in five pass the specification's own checks, two in five are planned."""
    hardware, model, machines, devices, stages = choose(WORKING)
    spec: dict[str, Any] = {
        "model": {"variant": model, "source": {"path": f"/m/DeepSeek-{choose(CHECKPOINTS[model])}"}},
        "topology": {
            "hardware": hardware,
            "nodesPerGroup": machines,
            "devicesPerNode": devices,
            "pipelineParallelSize": stages,
        },
        "engine": {"maxModelLen": 1024, "maxNumSeqs": 2, "maxNumBatchedTokens": 512},
    }
    if hardware == "GB10":
        # The machine's default leaves too little memory for Pro.
        spec["engine"]["gpuMemoryUtilization"] = 0.88
    for _ in range(choose([0, 1, 2, 3])):
        path, values = choose(ODDITIES)
        _put(spec, path, choose(values))
    return {"apiVersion": "dsv4.dev/v1alpha1", "kind": "DSV4Deployment", "metadata": {"name": "any"}, "spec": spec}


def _put(spec: dict[str, Any], path: str, value: object) -> None:
    *outer, last = path.split(".")
    for name in outer:
        spec = spec.setdefault(name, {})
    spec[last] = value
