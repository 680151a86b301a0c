"""Makes the Grafana dashboards again: `.venv/bin/python manifests/dashboards.py`.

One row of a table is one panel. Queries have the labels of `docs/monitoring.md`. Several gateways report the same vLLM,
so its metrics are merged by `max` before they are added.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "dsv4-operator" / "files" / "dashboards"
EXAMPLES = ROOT / "examples" / "monitoring"
_WIDTH = 24
_HEIGHT = 7
# Selections of labels in queries.
_FLEET, _CHOSEN, _LOCAL = "", '{namespace=~"$namespace",deployment=~"$deployment"}', '{deployment=~"$deployment"}'


@dataclass(frozen=True)
class Panel:
    """One panel: queries with their legends, the unit of Grafana, and the type of panel."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    type: str = "timeseries"
    width: int = 8


@dataclass(frozen=True)
class Dashboard:
    """One file. `variables` are names of labels, each with the metric that has its values."""

    uid: str
    title: str
    variables: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def panel(
    title: str, *queries: tuple[str, str], unit: str = "short", type: str = "timeseries", width: int = 8
) -> Panel:
    """Return a panel of `queries`."""
    return Panel(title, queries, unit, type, width)


def _vllm(metric: str, chosen: str, *labels: str, rate: bool = True) -> str:
    """Return the sum over engines, by `labels`, of a metric that several gateways report."""
    value = f"rate({metric}{chosen}[$__rate_interval])" if rate else f"{metric}{chosen}"
    by = ", ".join(("namespace", "deployment", *labels))
    return f"sum by ({by}) (max by ({by}, gateway_group, engine) ({value}))"


def _quantile(share: float, metric: str, chosen: str) -> str:
    rates = f"rate({metric}_bucket{chosen}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (le) ({rates}))"


def _quantiles(metric: str, chosen: str) -> tuple[tuple[str, str], ...]:
    return tuple((_quantile(share, metric, chosen), f"p{share * 100:.0f}") for share in (0.5, 0.95, 0.99))


def _speed(chosen: str) -> tuple[Panel, ...]:
    return (
        panel(
            "Tokens per second",
            (_vllm("vllm:generation_tokens_total", chosen), "{{deployment}} generated"),
            (_vllm("vllm:prompt_tokens_total", chosen), "{{deployment}} prompts"),
        ),
        Panel("Time to first token (vLLM)", _quantiles("vllm:time_to_first_token_seconds", chosen), "s"),
        Panel("Time between tokens", _quantiles("vllm:inter_token_latency_seconds", chosen), "s"),
        panel(
            "Requests in the engine",
            (_vllm("vllm:num_requests_running", chosen, rate=False), "{{deployment}} running"),
            (_vllm("vllm:num_requests_waiting", chosen, rate=False), "{{deployment}} waiting"),
            (_vllm("vllm:num_preemptions_total", chosen), "{{deployment}} preempted per second"),
        ),
        panel(
            "KV cache in use",
            (
                f"max by (deployment, gateway_group, engine) (vllm:kv_cache_usage_perc{chosen})",
                "{{deployment}} {{gateway_group}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Prefix cache hits",
            (
                f"{_vllm('vllm:prefix_cache_hits_total', chosen)} / {_vllm('vllm:prefix_cache_queries_total', chosen)}",
                "{{deployment}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Accepted draft tokens",
            (
                f"{_vllm('vllm:spec_decode_num_accepted_tokens_total', chosen)}"
                f" / {_vllm('vllm:spec_decode_num_draft_tokens_total', chosen)}",
                "{{deployment}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Acceptance by position",
            (
                f"{_vllm('vllm:spec_decode_num_accepted_tokens_per_pos_total', chosen, 'position')}"
                " / on (namespace, deployment) group_left ()"
                f" {_vllm('vllm:spec_decode_num_drafts_total', chosen)}",
                "{{deployment}} position {{position}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Tokens per step and request",
            (
                f"1 + {_vllm('vllm:spec_decode_num_accepted_tokens_total', chosen)}"
                f" / {_vllm('vllm:spec_decode_num_drafts_total', chosen)}",
                "{{deployment}}",
            ),
        ),
    )


def _gateway(chosen: str) -> tuple[Panel, ...]:
    def rate(metric: str, by: str) -> str:
        return f"sum by ({by}) (rate({metric}{chosen}[$__rate_interval]))"

    return (
        panel(
            "Requests per second by outcome",
            (rate("dsv4_gateway_requests_total", "outcome"), "{{outcome}}"),
            unit="reqps",
        ),
        panel(
            "Held requests",
            (f"sum by (deployment) (dsv4_gateway_held{chosen})", "{{deployment}} held"),
            (f"sum by (deployment) (dsv4_gateway_active{chosen})", "{{deployment}} in progress"),
        ),
        Panel("Time that requests were held", _quantiles("dsv4_gateway_hold_seconds", chosen), "s"),
        Panel("Time to first byte", _quantiles("dsv4_gateway_first_byte_seconds", chosen), "s"),
        panel(
            "Repairs of requests per second",
            (rate("dsv4_gateway_replayed_total", "deployment"), "{{deployment}} replayed"),
            (rate("dsv4_gateway_continued_total", "deployment"), "{{deployment}} continued"),
            (rate("dsv4_gateway_cut_total", "deployment"), "{{deployment}} cut"),
        ),
        panel("Refused per second", (rate("dsv4_gateway_refused_total", "code"), "{{code}}")),
        panel(
            "Engine of a group",
            (
                f"max by (deployment, group, state) (dsv4_gateway_engine_state{chosen}) == 1",
                "{{deployment}}/{{group}} {{state}}",
            ),
            type="state-timeline",
        ),
        panel(
            "Deaths of the engine in the last hour by cause",
            (
                f"max by (deployment, group, cause) (dsv4_gateway_engine_recent_failures{chosen})",
                "{{deployment}}/{{group}} {{cause}}",
            ),
        ),
        panel(
            "Engine restarts in place",
            (f"max by (deployment, group) (dsv4_gateway_engine_restarts{chosen})", "{{deployment}}/{{group}}"),
        ),
        panel(
            "Age of the latest agent status",
            (f"max by (deployment, group) (dsv4_gateway_watch_age_seconds{chosen})", "{{deployment}}/{{group}}"),
            unit="s",
        ),
        panel(
            "Memory kept for clients",
            (f"sum by (deployment) (dsv4_gateway_client_bytes{chosen})", "{{deployment}}"),
            (f"sum by (deployment) (dsv4_gateway_held_bytes{chosen})", "{{deployment}} held bodies"),
            unit="bytes",
        ),
        panel(
            "Rejected credentials",
            (f"max by (deployment) (dsv4_gateway_credentials_rejected{chosen})", "{{deployment}}"),
        ),
    )


def _machines(chosen: str) -> tuple[Panel, ...]:
    member = "{{deployment}}/{{group}} rank {{rank}}"

    def gpu(metric: str) -> tuple[str, str]:
        return f"max by (deployment, group, rank, gpu) ({metric}{chosen})", member + " GPU {{gpu}}"

    def node(metric: str) -> tuple[str, str]:
        return f"max by (deployment, group, rank) ({metric}{chosen})", member

    return (
        panel("Available memory of machines", node("dsv4_node_memory_available_bytes"), unit="bytes"),
        panel("GPU memory in use", gpu("dsv4_gpu_memory_used_bytes"), gpu("dsv4_gpu_memory_bytes"), unit="bytes"),
        panel("Free shared memory", node("dsv4_node_shared_memory_free_bytes"), unit="bytes"),
        panel("GPU temperature", gpu("dsv4_gpu_celsius"), unit="celsius"),
        panel("GPU power", gpu("dsv4_gpu_power_watts"), unit="watt"),
        panel("GPU clock", gpu("dsv4_gpu_clock_mhz"), gpu("dsv4_gpu_clock_max_mhz")),
        panel("GPU utilization", gpu("dsv4_gpu_utilization"), unit="percentunit"),
        panel(
            "Reasons of a low clock",
            (
                f"max by (deployment, group, rank, gpu, reason) (dsv4_gpu_slowed{chosen})",
                member + " GPU {{gpu}} {{reason}}",
            ),
        ),
        panel("GPU warnings", node("dsv4_agent_gpu_warnings")),
        panel("Bandwidth between members", node("dsv4_fabric_bandwidth_bytes"), unit="Bps"),
        panel(
            "NCCL transport",
            (
                f"max by (deployment, group, transport) (dsv4_fabric_transport{chosen})",
                "{{deployment}}/{{group}} {{transport}}",
            ),
            node("dsv4_fabric_rdma_rails"),
        ),
        panel("Repaired files of weights", node("dsv4_agent_weights_repaired")),
    )


def _engine(chosen: str) -> tuple[Panel, ...]:
    member = "{{deployment}}/{{group}} rank {{rank}}"
    return (
        panel(
            "Phase of members",
            (f"max by (deployment, group, rank, phase) (dsv4_agent_phase{chosen}) == 1", member + " {{phase}}"),
            type="state-timeline",
        ),
        panel(
            "Health",
            (f"max by (deployment, group, rank, health) (dsv4_agent_health{chosen}) == 1", member + " {{health}}"),
            type="state-timeline",
        ),
        panel(
            "Engine generation",
            (f"max by (deployment, group) (dsv4_engine_generation{chosen})", "{{deployment}}/{{group}}"),
        ),
        panel(
            "KV cache in tokens",
            (f"max by (deployment, group) (dsv4_engine_kv_cache_tokens{chosen})", "{{deployment}}/{{group}}"),
            (
                f"max by (deployment, group) (dsv4_engine_kv_cache_planned_tokens{chosen})",
                "{{deployment}}/{{group}} planned",
            ),
        ),
        panel(
            "Memory over the plan",
            (
                f"max by (deployment, group, item) (dsv4_engine_memory_over_plan_bytes{chosen})",
                "{{deployment}}/{{group}} {{item}}",
            ),
            unit="bytes",
        ),
        panel(
            "Kernels",
            (f"max by (deployment, group, op, provider) (dsv4_kernel_provider{chosen})", "{{op}}: {{provider}}"),
            type="table",
        ),
    )


_GROUP = "{{namespace}}/{{deployment}}/{{group}}"


def _by_group(
    metric: str, *labels: str, function: str = "max", chosen: str = _FLEET, suffix: str = ""
) -> tuple[str, str]:
    by = ", ".join(("namespace", "deployment", "group", *labels))
    legend = " ".join((_GROUP, *(f"{{{{{label}}}}}" for label in labels)))
    return f"{function} by ({by}) ({metric}{chosen}){suffix}", legend


def _recovery(chosen: str) -> tuple[Panel, ...]:
    return (
        panel("Phase", _by_group("dsv4_group_phase", "phase", chosen=chosen, suffix=" == 1"), type="state-timeline"),
        panel("Restarts left", _by_group("dsv4_group_restarts_left", function="min", chosen=chosen), type="bargauge"),
        panel("Deaths in the last hour by cause", _by_group("dsv4_group_recent_failures", "cause", chosen=chosen)),
        panel("Time of the latest recovery", _by_group("dsv4_group_recovery_seconds", chosen=chosen), unit="s"),
        panel(
            "Restarts",
            _by_group("dsv4_group_restarts_total", chosen=chosen),
            _by_group("dsv4_group_restarts_allowed", chosen=chosen),
        ),
        panel("Members with a slow GPU", _by_group("dsv4_group_slow_members", chosen=chosen)),
    )


DASHBOARDS = {
    CHART / "fleet.json": Dashboard(
        "dsv4-fleet",
        "dsv4 / Fleet",
        (),
        (
            (
                "Deployments",
                (
                    panel("Deployments by phase", ("sum by (phase) (dsv4_deployments) > 0", "{{phase}}"), type="stat"),
                    panel("Groups", ("max(dsv4_groups)", "exist"), ("max(dsv4_groups_ready)", "serve"), type="stat"),
                    panel(
                        "Firing alerts",
                        (
                            'count by (alertname, severity) (ALERTS{alertname=~"DSV4.+",alertstate="firing"})',
                            "{{alertname}}",
                        ),
                        type="stat",
                    ),
                ),
            ),
            ("Recovery", _recovery(_FLEET)),
            (
                "Requests",
                (
                    panel(
                        "Generated tokens per second",
                        (_vllm("vllm:generation_tokens_total", _FLEET), "{{namespace}}/{{deployment}}"),
                    ),
                    panel(
                        "Held requests",
                        ("sum by (namespace, deployment) (dsv4_gateway_held)", "{{namespace}}/{{deployment}}"),
                    ),
                    panel(
                        "KV cache in use",
                        ("max by (namespace, deployment) (vllm:kv_cache_usage_perc)", "{{namespace}}/{{deployment}}"),
                        unit="percentunit",
                    ),
                ),
            ),
            (
                "Operator",
                (
                    panel(
                        "Reconciles per second",
                        ("sum by (result) (rate(dsv4_operator_looks_total[$__rate_interval]))", "{{result}}"),
                    ),
                    Panel("Duration of a reconcile", _quantiles("dsv4_operator_look_seconds", _FLEET), "s"),
                    panel(
                        "Failed parts per second",
                        ("sum by (part) (rate(dsv4_operator_failures_total[$__rate_interval]))", "{{part}}"),
                    ),
                    panel(
                        "Requests to the API server",
                        (
                            "sum by (method, status) (rate(dsv4_operator_requests_total[$__rate_interval]))",
                            "{{method}} {{status}}",
                        ),
                        unit="reqps",
                    ),
                    panel(
                        "Events per second",
                        ("sum by (reason) (rate(dsv4_operator_events_total[$__rate_interval]))", "{{reason}}"),
                    ),
                    panel(
                        "Leader and queue",
                        ("sum(dsv4_operator_leading)", "leading"),
                        ("max(dsv4_operator_queue)", "queued"),
                    ),
                    panel(
                        "Webhook certificate",
                        ("min(dsv4_operator_certificate_expiry_timestamp_seconds) - time()", "until it expires"),
                        unit="s",
                        type="stat",
                    ),
                    panel("Restarts of all groups", ("max(dsv4_restarts)", "restarts"), type="stat"),
                ),
            ),
        ),
    ),
    CHART / "group.json": Dashboard(
        "dsv4-group",
        "dsv4 / Group",
        (("namespace", "dsv4_group_phase"), ("deployment", "dsv4_group_phase")),
        (
            ("Recovery", _recovery(_CHOSEN)),
            (
                "Memory of the plan",
                (
                    panel(
                        "KV cache in tokens",
                        _by_group("dsv4_group_kv_cache_tokens", chosen=_CHOSEN),
                        _by_group("dsv4_group_kv_cache_planned_tokens", chosen=_CHOSEN),
                    ),
                    panel(
                        "Memory over the plan",
                        _by_group("dsv4_group_memory_over_plan_bytes", "item", chosen=_CHOSEN),
                        unit="bytes",
                    ),
                ),
            ),
            ("Engine", _engine(_CHOSEN)),
            ("Machines", _machines(_CHOSEN)),
        ),
    ),
    CHART / "gateway.json": Dashboard(
        "dsv4-gateway",
        "dsv4 / Gateway",
        (("namespace", "dsv4_gateway_active"), ("deployment", "dsv4_gateway_active")),
        (("Gateway", _gateway(_CHOSEN)), ("Engine", _speed(_CHOSEN))),
    ),
    EXAMPLES / "machine.json": Dashboard(
        "dsv4-machine",
        "dsv4 / Machines without Kubernetes",
        (("deployment", "dsv4_gateway_active"),),
        (
            ("Gateway", _gateway(_LOCAL)),
            ("Engine", _speed(_LOCAL)),
            ("Recovery and memory", _engine(_LOCAL)),
            ("Machines", _machines(_LOCAL)),
        ),
    ),
}


def render(dashboard: Dashboard) -> str:
    """Return the JSON of a dashboard."""
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["dsv4"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": list(_variables(dashboard))},
        "panels": list(_panels(dashboard)),
    }
    return json.dumps(document, indent=1) + "\n"


def _variables(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    known: list[str] = []
    for label, metric in dashboard.variables:
        chosen = "{" + ",".join(f'{name}=~"${name}"' for name in known) + "}" if known else ""
        yield {
            "name": label,
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": f"label_values({metric}{chosen}, {label})",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
        known.append(label)


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    number, x, y = 0, 0, 0
    for title, panels in dashboard.rows:
        y += _HEIGHT if x else 0
        number, x = number + 1, 0
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(0, y, _WIDTH, 1),
        }
        y += 1
        for found in panels:
            if x + found.width > _WIDTH:
                x, y = 0, y + _HEIGHT
            number += 1
            yield {
                "id": number,
                "type": found.type,
                "title": found.title,
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "gridPos": _place(x, y, found.width, _HEIGHT),
                "fieldConfig": {"defaults": {"unit": found.unit}, "overrides": []},
                "targets": [
                    {
                        "refId": chr(ord("A") + index),
                        "expr": query,
                        "legendFormat": legend,
                        "instant": found.type == "table",
                    }
                    for index, (query, legend) in enumerate(found.queries)
                ],
            }
            x += found.width


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def main() -> None:
    """Write them."""
    for path, dashboard in DASHBOARDS.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(dashboard))


if __name__ == "__main__":
    main()
