"""A deployment on two DGX Sparks with a failure, and results of checks and benchmarks, for reports."""

from __future__ import annotations

import random
from typing import Any

from dsv4_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    DeploymentPhase,
    DeploymentStatus,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    KvCacheStatus,
    MeasuredItem,
    MeasuredStatus,
    MemberStatus,
    Reason,
    load,
)
from dsv4_operator.cli.sources.base import DeploymentView
from dsv4_runtime.contract import Cause, KernelStatus, Phase, ProviderStatus, Role
from dsv4_runtime.contract.kernels import Op

NOW = 1_790_000_000.0

SPARKS = f"""
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {{name: flash, namespace: lab}}
spec:
  model:
    variant: Flash
    source: {{huggingFace: {{repo: deepseek-ai/DeepSeek-V4-Flash-0731, revision: "{"0" * 40}"}}}}
    servedNames: [ours]
  topology: {{hardware: GB10, nodesPerGroup: 2}}
  engine:
    image: registry.lab.example/vllm/vllm-openai@sha256:{"ab" * 32}
    profile: vllm-0.33
    maxModelLen: 131072
    kernels: auto
    speculative: {{method: DSpark}}
    extraArgs: [--linear-backend=b12x, --our-own-flag, "value"]
    env: [{{name: NCCL_DEBUG, value: INFO}}, {{name: OUR_THING, value: hunter2}}]
"""

KERNELS = (
    KernelStatus(
        op="moe",
        provider="bundled",
        standings=(
            ProviderStatus(provider="bundled", slowness=1.0),
            ProviderStatus(provider="marlin", slowness=1.28),
            ProviderStatus(provider="deepgemm", excluded="t1: not done after 20 s"),
        ),
    ),
    KernelStatus(op="indexer", provider="stock", note="bundled was chosen; stays with vLLM's own kernels (x)"),
)


def sparks() -> DeploymentView:
    """Return the deployment; it serves again after one failure."""
    members = (
        MemberStatus(rank=0, role=Role.HEAD, node="spark-a", address="192.168.100.10", phase=Phase.SERVING),
        MemberStatus(
            rank=1,
            node="spark-b",
            address="192.168.100.11",
            phase=Phase.SERVING,
            warnings=(
                "GPU 0 runs at 850 of 2418 MHz under load, 38 W; if that stays, disconnect the machine's power supply",
                "something new on spark-b",
            ),
        ),
    )
    failure = FailureStatus(
        time=NOW - 7264,
        cause=Cause.ENGINE_HUNG,
        incarnation=1,
        engine_generation=1,
        culprit_rank=1,
        culprit_node="spark-b",
        message="no step for 60 s on spark-b",
        detected_by="steps",
        level=1,
        recover_seconds=63.5,
        evidence="/var/lib/dsv4/evidence/1",
    )
    measured = MeasuredStatus(
        of="V4-Flash-0731 in registry.lab.example/vllm on gb10",
        incarnation=1,
        time=NOW - 7200,
        items=(
            MeasuredItem(item="weights", difference=2**30),
            MeasuredItem(item="non-torch memory", difference=-(2**28)),
            MeasuredItem(item="item of another version", difference=1),
        ),
    )
    group = GroupStatus(
        phase=GroupPhase.SERVING,
        incarnation=1,
        members=members,
        engine_generation=2,
        ready_time=NOW - 7200,
        kv_cache=KvCacheStatus(tokens=612_345, concurrency=4.67, planned_tokens=601_000),
        kernels=KERNELS,
        measured=measured,
        total_restarts=1,
        last_failure=failure,
        history=(failure,),
    )
    ready = Condition(
        type=ConditionType.READY,
        status=ConditionStatus.TRUE,
        last_transition_time=NOW - 7200,
        reason=Reason.ALL_GROUPS_READY,
        message="http://192.168.100.10:8000 serves",
    )
    status = DeploymentStatus(
        phase=DeploymentPhase.SERVING,
        conditions=(ready,),
        replicas=1,
        ready_replicas=1,
        endpoint="http://192.168.100.10:8000/v1",
        groups=(group,),
    )
    return DeploymentView(load(SPARKS).model_copy(update={"status": status}), True, NOW - 86_400)


def doctor() -> dict[str, Any]:
    """Return a document of `dsv4 doctor` for a Spark."""
    return {
        "ok": True,
        "checks": [
            {"name": "kernel", "level": "ok", "found": "6.17.0-spark-a", "value": "6.17.0-spark-a"},
            {"name": "rdma", "level": "ok", "found": "rocep1s0f0 with 192.168.100.10"},
            {"name": "port rocep1s0f1", "level": "warn", "found": "not used: down", "reason": "LinkDown"},
            {"name": "mtu", "level": "ok", "found": "9000", "value": 9000},
        ],
        "interfaces": [
            {"name": "enp1s0f0np0", "up": True, "mtu": 9000, "speed": 200_000, "addresses": ["192.168.100.10/24"]},
        ],
        "rails": [
            {"interface": "enp1s0f0np0", "address": "192.168.100.10/24", "mtu": 9000, "hca": "rocep1s0f0"},
        ],
        "environment": [{"name": "NCCL_SOCKET_IFNAME", "value": "enp1s0f0np0", "reason": "x"}],
    }


VERIFY: dict[str, Any] = {
    "url": "http://192.168.100.10:8000/v1",
    "quick": False,
    "facts": {"model": "ours", "max_model_len": 131_072, "vllm": True, "correct": 3, "engine": "0.33.0"},
    "seconds": 412.3,
    "exitCode": 1,
    "summary": {"ok": 1, "failed": 1, "skipped": 1},
    "results": [
        {"name": "smoke.chat", "status": "ok", "figures": {"seconds": 0.42}, "seconds": 0.43},
        {
            "name": "context.needles",
            "status": "failed",
            "text": "a fact at 45% is not found",
            "evidence": ["The secret is 4711"],
            "remedy": "see `dsv4 why`",
            "seconds": 61.0,
        },
        {"name": "speculative.tokens", "status": "skipped", "reason": "NoReference", "seconds": 0.0},
        {
            "name": "speculative.acceptance",
            "status": "ok",
            "figures": {"drafts": 512, "per_position": [0.81, 0.62], "output": "text", "tokens_per_step": 2.43},
            "seconds": 9.1,
        },
    ],
}

BENCH: dict[str, Any] = {
    "schema": 1,
    "endpoint": "http://192.168.100.10:8000/v1",
    "runs": [
        {
            "profile": "chat",
            "concurrency": 1,
            "requestsPerSecond": 0.16,
            "outputTokensPerSecond": 40.65,
            "ttftSeconds": {"p50": 0.41, "p95": 0.62},
            "tpotSeconds": {"p50": 0.0243, "p95": 0.0266},
            "prompts": ["a prompt"],
        },
        {
            "profile": "rag",
            "concurrency": 4,
            "requestsPerSecond": 0.3,
            "outputTokensPerSecond": 84.0,
            "ttftSeconds": {"p50": 3.9, "p95": 6.1},
            "tpotSeconds": None,
        },
        {"profile": "of spark-a", "concurrency": "many", "outputTokensPerSecond": True},
    ],
}


RECOVERY: dict[str, Any] = {
    "schema": 1,
    "model": "ours",
    "clients": 4,
    "runs": [
        {
            "fault": "stop-engine",
            "repetitions": 1,
            "requests": 12,
            "lost": 0,
            "detectSeconds": 2.5,
            "recoverSeconds": 63.5,
            "outageSeconds": 64.75,
            "causes": {"EngineHung": 1},
            "samples": [{"cause": "EngineHung", "level": 1, "rank": 0, "detectSeconds": 2.5, "outageSeconds": 64.75}],
        },
        {"fault": "of spark-a", "lost": "many", "samples": "none"},
    ],
}


def large_status(groups: int, members: int, *, alike: bool) -> DeploymentStatus:
    """Return a status with `groups` groups that all failed ten times; `alike`: with equal kernels."""
    chance = random.Random(7)

    def failure(number: int) -> FailureStatus:
        return FailureStatus(
            time=NOW - chance.random() * 1e6,
            cause=chance.choice(list(Cause)),
            incarnation=number,
            culprit_rank=1,
            message="x" * 1024,
            detected_by="completion",
            level=2,
            recover_seconds=chance.random() * 100,
        )

    def kernels(index: int) -> tuple[KernelStatus, ...]:
        names = ("bundled", "marlin", "deepgemm", "cutlass", "flashinfer", "b12x", "triton", "cuda")
        excluded = "not done" if not alike and index % 2 else None
        providers = [ProviderStatus(provider=name, slowness=chance.random() + 1) for name in names]
        odd = ProviderStatus(provider=names[index % 8] if not alike else "gate", excluded=excluded or "wrong")
        return tuple(
            KernelStatus(op=op, provider="bundled" if alike else names[index % 8], standings=(*providers, odd))
            for op in Op
        )

    warning = "GPU 0 runs at 850 of 2418 MHz under load"
    items = ("weights", "activations", "non-torch memory", "CUDA graphs", "KV cache")
    found = tuple(
        GroupStatus(
            index=index,
            phase=GroupPhase.SERVING,
            incarnation=11,
            members=tuple(MemberStatus(rank=rank, warnings=(warning,)) for rank in range(members)),
            engine_generation=1,
            ready_time=NOW - 50,
            kv_cache=KvCacheStatus(tokens=612_345, concurrency=4.67, planned_tokens=601_000),
            kernels=kernels(index),
            measured=MeasuredStatus(
                of="Nano in the default image on cpu",
                incarnation=11,
                items=tuple(MeasuredItem(item=name, difference=chance.randint(-(2**30), 2**30)) for name in items),
            ),
            total_restarts=10,
            history=tuple(failure(number) for number in range(10)),
        )
        for index in range(groups)
    )
    return DeploymentStatus(phase=DeploymentPhase.SERVING, groups=found)
