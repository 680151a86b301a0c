"""Alerts, dashboards, and the metrics available to them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dsv4_operator.api import (
    DeploymentStatus,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    KvCacheStatus,
    MemberStatus,
    Reason,
)
from dsv4_operator.api.deployment import parse
from dsv4_operator.api.status import MeasuredItem, MeasuredStatus
from dsv4_operator.controller.observability import OperatorMetrics
from dsv4_operator.lifecycle import Event, EventType
from dsv4_runtime.agent import http
from dsv4_runtime.contract import (
    AgentStatus,
    Cause,
    EngineStatus,
    FabricStatus,
    Failure,
    GpuSignals,
    Health,
    KernelStatus,
    Phase,
    ProviderStatus,
    Rail,
    Signals,
    Verdict,
)
from dsv4_runtime.gateway.metrics import GatewayMetrics
from dsv4_runtime.gateway.routing import Availability
from dsv4_runtime.util.clock import unix_time

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "charts" / "dsv4-operator" / "files" / "alerts.yaml"
DASHBOARDS = (
    *sorted((ROOT / "charts" / "dsv4-operator" / "files" / "dashboards").glob("*.json")),
    ROOT / "examples" / "monitoring" / "machine.json",
)

VLLM = {
    # vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py; vLLM 0.32 and 0.33. Counters get `_total`.
    "vllm:generation_tokens": "counter",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "counter",
    "vllm:spec_decode_num_draft_tokens": "counter",
    "vllm:spec_decode_num_drafts": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
}
"""Types of vLLM's metrics that alerts and dashboards use."""


def alerts() -> list[dict[str, Any]]:
    """Return the rules of the rule file."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Yield (`dashboard/panel`, query) of every panel, without variables of Grafana."""
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$__rate_interval", "1m")
                yield f"{file.stem}/{panel['title']}", re.sub(r"\$\w+", ".*", query)


def exported() -> dict[str, bytes]:
    """Return the metrics of a served deployment with failures: of the operator, an agent of rank 0, and a gateway.

    Every optional value is set, so that every metric has a sample.
    """
    return {"operator": _operator(), "agent": _agent(), "gateway": _gateway() + _vllm()}


def samples() -> dict[str, set[str]]:
    """Return the labels of every exported metric by the name of its samples."""
    found: dict[str, set[str]] = {}
    for text in exported().values():
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def _operator() -> bytes:
    now = unix_time()
    manifest = yaml.safe_load((ROOT / "examples" / "nano.yaml").read_text())
    manifest["metadata"] |= {"namespace": "models", "name": "flash"}
    died = FailureStatus(time=now - 10, cause=Cause.ENGINE_HUNG, recover_seconds=12.5)
    group = GroupStatus(
        index=0,
        phase=GroupPhase.SERVING,
        members=(MemberStatus(rank=0),),
        restarts=(now - 10,),
        total_restarts=1,
        kv_cache=KvCacheStatus(tokens=900, planned_tokens=1000),
        measured=MeasuredStatus(of="x", incarnation=1, items=(MeasuredItem(item="weights", difference=5),)),
        last_failure=died,
        history=(died,),
    )
    status = DeploymentStatus(replicas=1, ready_replicas=1, groups=(group,))
    deployment = parse(manifest).model_copy(update={"status": status})
    metrics = OperatorMetrics()
    metrics.observe(lambda: [deployment], lambda: True, lambda: 0, lambda: now + 86400)
    metrics.count_request("GET", 200)
    metrics.count_event(Event(EventType.NORMAL, Reason.STEADY, "all groups serve"))
    return metrics.text()


def _status() -> AgentStatus:
    died = Failure(time=unix_time() - 10, cause=Cause.ENGINE_HUNG, message="no step", detected_by="steps")
    seen = (ProviderStatus(provider="bundled", slowness=1.0), ProviderStatus(provider="marlin", excluded="not right"))
    return AgentStatus(
        deployment="flash",
        group=0,
        incarnation=1,
        rank=0,
        phase=Phase.SERVING,
        phase_time=0.0,
        time=0.0,
        verdict=Verdict(health=Health.HEALTHY),
        joined=True,
        group_watts=60.0,
        signals=Signals(
            time=1.0,
            memory_available=2**36,
            shm_free=2**30,
            gpus=(
                GpuSignals(
                    index=0,
                    power_watts=60.0,
                    sm_mhz=2000,
                    sm_max_mhz=2400,
                    celsius=60,
                    slowed_by=("power cap",),
                    utilization=0.9,
                    memory_used=2**35,
                    memory_total=2**36,
                ),
            ),
        ),
        engine=EngineStatus(
            generation=2,
            restarts=(1.0,),
            failures=(died,),
            kv_cache_tokens=900,
            kv_planned_tokens=1000,
            memory={"weights": 5},
            kernels=(KernelStatus(op="moe", provider="bundled", standings=seen),),
        ),
        fabric=FabricStatus(
            rails=(Rail(interface="a", address="192.0.2.1/24", mtu=9000, hca="mlx5_0"),), bandwidth=2e10, transport="IB"
        ),
    )


class _Reporter:
    def status(self) -> AgentStatus:
        return _status()


def _agent() -> bytes:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(http._Collector(_Reporter()))  # type: ignore[arg-type]
    return generate_latest(registry)


class _Engine:
    state = Availability.HEALTHY


class _Group:
    engine = _Engine()
    age = 0.5
    connected = True

    @property
    def report(self) -> AgentStatus:
        return _status()


class _Groups:
    all: Mapping[int, _Group] = {0: _Group()}
    refusal = None


def _gateway() -> bytes:
    metrics = GatewayMetrics()
    metrics.observe(_Groups(), lambda: 1, lambda: 2**20, lambda: 0.0)  # type: ignore[arg-type]
    metrics.hold.observe(1.0)
    metrics.first_byte.observe(0.1)
    return metrics.text()


def _vllm() -> bytes:
    """Return metrics in vLLM's format, with values that differ between calls."""
    lines, value = [], unix_time() % 1e6
    for name, kind in VLLM.items():
        labels = 'engine="0",model_name="flash"' + ',position="0"' * name.endswith("_per_pos")
        lines.append(f"# TYPE {name}{'_total' * (kind == 'counter')} {kind}")
        if kind == "histogram":
            lines += [f'{name}_bucket{{{labels},le="{bound}"}} {value}' for bound in ("0.1", "+Inf")]
            lines += [f"{name}_count{{{labels}}} {value}", f"{name}_sum{{{labels}}} {value}"]
        else:
            lines.append(f"{name}{'_total' * (kind == 'counter')}{{{labels}}} {value if kind == 'counter' else 0.5}")
    return "\n".join((*lines, "")).encode()
