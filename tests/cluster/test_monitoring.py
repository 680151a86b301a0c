"""Alerts and dashboards with the real Prometheus: each fault has its alert and no other, and every panel has data."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import prometheus
import pytest
import yaml
from clusterkit import build

from dsv4_operator.api import GroupPhase
from dsv4_runtime.contract import Cause
from dsv4_testkit import monitoring

pytestmark = prometheus.needed
SECONDS = 400
Series = dict[str, str]


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        [build.built("prometheus") / "promtool", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def series(name: str, **labels: object) -> str:
    matchers = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{matchers}}}"


def deployed(name: str, **labels: object) -> str:
    return series(name, namespace="models", deployment="flash", **labels)


def of_group(name: str, **labels: object) -> str:
    return deployed(name, group=0, **labels)


def phases(present: GroupPhase) -> Series:
    return {of_group("dsv4_group_phase", phase=phase): f"{int(phase is present)}x180" for phase in GroupPhase}


def agent(name: str, rank: int, **labels: object) -> str:
    return of_group(name, rank=rank, instance=f"m{rank}:8090", **labels)


# A sample each minute for three hours, evaluated at 2:30.
HEALTHY: Series = {
    **phases(GroupPhase.SERVING),
    of_group("dsv4_group_restarts_total"): "1x100 2 3x79",
    of_group("dsv4_group_restarts_allowed"): "5x180",
    of_group("dsv4_group_restarts_left"): "2x180",
    of_group("dsv4_group_recent_failures", cause="EngineHung"): "1x180",
    of_group("dsv4_group_slow_members"): "0x180",
    **{deployed("dsv4_gateway_engine_state", pod=pod, group=0, state="healthy"): "1x180" for pod in "ab"},
    **{deployed("dsv4_gateway_engine_state", pod=pod, group=0, state="away"): "0x180" for pod in "ab"},
    **{deployed("dsv4_gateway_engine_restarts", pod=pod, group=0): "0x100 1x80" for pod in "ab"},
    **{deployed("dsv4_gateway_engine_recent_failures", pod=pod, group=0, cause="EngineHung"): "1x180" for pod in "ab"},
    **{deployed("dsv4_gateway_watch_age_seconds", pod=pod, group=0): "1x180" for pod in "ab"},
    deployed("dsv4_gateway_loop_overdue_seconds", gateway=0): "0x143 30 90 90 0x34",
    deployed("dsv4_gateway_held", pod="a"): "3x145 0 3x35",
    deployed("dsv4_gateway_credentials_rejected", pod="a"): "0x180",
    deployed("dsv4_gateway_requests_total", pod="a", outcome="ok"): "0+100x180",
    deployed("dsv4_gateway_requests_total", pod="a", outcome="cancelled"): "0+1x180",
    deployed("dsv4_gateway_requests_total", pod="a", outcome="lost"): "7x180",
    **{agent("dsv4_agent_gpu_warnings", rank): "0x143 1 1 0x35" for rank in (0, 1)},
    **{agent("dsv4_agent_weights_repaired", rank): "0x180" for rank in (0, 1)},
    agent("dsv4_fabric_transport", 0, transport="IB"): "1x180",
    **{agent("dsv4_fabric_rdma_rails", rank): "2x180" for rank in (0, 1)},
    agent("dsv4_fabric_bandwidth_bytes", 0): "20x60 18x120",
    deployed("vllm:kv_cache_usage_perc", gateway_group=0, pod="a", engine=0, model_name="flash"): "0.99x180",
    deployed("vllm:kv_cache_usage_perc", gateway_group=1, pod="b", engine=0, model_name="flash"): "0.5x180",
    series("dsv4_operator_leading", pod="a"): "1x180",
    series("dsv4_operator_leading", pod="b"): "0x180",
    series("dsv4_operator_looks_total", pod="a", result="ok"): "0+3x180",
    series("dsv4_operator_failing", pod="a", part="observe"): "1x140 0 0 1x38",
    series("dsv4_groups", pod="a"): "1x180",
    series("dsv4_operator_certificate_expiry_timestamp_seconds", pod="a"): "1300000x180",
}
MACHINE = {name: values for name, values in HEALTHY.items() if not name.startswith(("dsv4_group", "dsv4_operator"))}
"""The same series without Kubernetes."""
AWAY: Series = {
    deployed("dsv4_gateway_engine_state", pod=pod, group=0, state=state): f"{value}x180"
    for pod in "ab"
    for state, value in (("healthy", 0), ("away", 1))
}
SILENT: Series = {deployed("dsv4_gateway_watch_age_seconds", pod=pod, group=0): "100+60x180" for pod in "ab"}

FAULTS: dict[str, tuple[Series, ...]] = {
    # Further faults are generated from phases and causes.
    "DSV4RecoveryExhausted": (phases(GroupPhase.FAILED) | AWAY,),
    "DSV4GroupNotServing": (phases(GroupPhase.RECOVERING) | AWAY, AWAY),
    "DSV4EngineHangsOften": ({of_group("dsv4_group_recent_failures", cause="AgentHung"): "1x180"},),
    "DSV4RestartsOften": ({of_group("dsv4_group_restarts_total"): "1x100 2 3 4x78"},),
    "DSV4RestartBudgetLow": (
        {of_group("dsv4_group_restarts_left"): "1x180"},
        {of_group("dsv4_group_restarts_left"): "0x180", of_group("dsv4_group_restarts_allowed"): "1x180"},
    ),
    "DSV4WeightsDamaged": ({agent("dsv4_agent_weights_repaired", 1): "0x100 1x80"},),
    "DSV4GpuThrottled": (
        {of_group("dsv4_group_slow_members"): "0x120 1x60"},
        {agent("dsv4_agent_gpu_warnings", 1): "0x120 2x60"},
    ),
    "DSV4LinkFailing": ({of_group("dsv4_group_recent_failures", cause="LinkLost"): "1x180"},),
    "DSV4SocketFallback": (
        {
            agent("dsv4_fabric_transport", 0, transport="IB"): "_x181",
            agent("dsv4_fabric_transport", 0, transport="Socket"): "1x180",
        },
    ),
    "DSV4LinkSlow": ({agent("dsv4_fabric_bandwidth_bytes", 0): "20x60 13x120"},),
    "DSV4KvCacheFull": (
        {deployed("vllm:kv_cache_usage_perc", gateway_group=1, pod="b", engine=0, model_name="flash"): "0.97x180"},
    ),
    "DSV4RequestsHeld": ({deployed("dsv4_gateway_held", pod="a"): "0x120 2x60"},),
    "DSV4RequestsLost": tuple(
        {deployed("dsv4_gateway_requests_total", pod="a", outcome=outcome): "7x143 8x40"}
        for outcome in ("lost", "unavailable", "timeout", "fatal")
    ),
    "DSV4CredentialsRejected": ({deployed("dsv4_gateway_credentials_rejected", pod="a"): "0x120 1x60"},),
    "DSV4AgentSilent": (SILENT,),
    "DSV4LoopSilent": ({deployed("dsv4_gateway_loop_overdue_seconds", gateway=0): "0x140 10+60x40"},),
    "DSV4OperatorDown": (
        {series("dsv4_operator_leading", pod="a"): "1x120 0x60"},
        {series("dsv4_operator_leading", pod=pod): "1x120 _x60" for pod in "ab"},
    ),
    "DSV4OperatorStalled": ({series("dsv4_operator_looks_total", pod="a", result="ok"): "0+3x120 360x60"},),
    "DSV4OperatorFailing": ({series("dsv4_operator_failing", pod="a", part="observe"): "0x100 1x80"},),
    "DSV4WebhookCertificateExpires": (
        {series("dsv4_operator_certificate_expiry_timestamp_seconds", pod="a"): "1200000x180"},
    ),
}
ON_A_MACHINE = {
    "DSV4GroupNotServing": AWAY,
    "DSV4RestartsOften": {deployed("dsv4_gateway_engine_restarts", pod="a", group=0): "0x100 1 2 3x78"},
    "DSV4AgentSilent": SILENT,
    "DSV4LoopSilent": {deployed("dsv4_gateway_loop_overdue_seconds", gateway=0): "0x140 10+60x40"},
}
"""Faults whose series differ without the operator's metrics."""
RESTING = {GroupPhase.QUEUED, GroupPhase.DRAINING, GroupPhase.SUSPENDED, GroupPhase.STOPPED}
HANGS = {cause for cause in Cause if cause.value.endswith("Hung")} | {Cause.PEER_TO_PEER_HANG}
BY_CAUSE = {
    **dict.fromkeys(HANGS, "DSV4EngineHangsOften"),
    **dict.fromkeys((Cause.WEIGHTS_CORRUPT, Cause.ENGINE_WRONG), "DSV4WeightsDamaged"),
    **dict.fromkeys((Cause.FABRIC_DOWN, Cause.FABRIC_ERROR, Cause.LINK_LOST, Cause.NCCL_TIMEOUT), "DSV4LinkFailing"),
    Cause.NCCL_SOCKET_FALLBACK: "DSV4SocketFallback",
}


def cases() -> Iterator[tuple[str, Series, str | None]]:
    """Yield (name, series, the alert that fires)."""
    yield "healthy", HEALTHY, None
    yield "healthy on a machine", MACHINE, None
    # For a scrape interval, Prometheus has the series of the operator that ended and those of the next one.
    group = [name for name in HEALTHY if name.startswith("dsv4_group_")]
    next_operator = {name.replace("{", '{pod="b",'): HEALTHY[name] for name in group}
    yield "another operator", HEALTHY | next_operator, None
    yield "no restart allowed", HEALTHY | _budget(allowed=0, left=0), None
    yield "one restart allowed", HEALTHY | _budget(allowed=1, left=1), None
    yield (
        "nothing to reconcile",
        HEALTHY
        | {
            series("dsv4_groups", pod="a"): "0x180",
            series("dsv4_operator_looks_total", pod="a", result="ok"): "9x180",
        },
        None,
    )
    sockets = {agent("dsv4_fabric_rdma_rails", rank): "0x180" for rank in (0, 1)}
    yield "sockets without RDMA", HEALTHY | FAULTS["DSV4SocketFallback"][0] | sockets, None
    for alert, faults in FAULTS.items():
        for number, fault in enumerate(faults):
            yield f"{alert} {number}", HEALTHY | fault, alert
    for alert, fault in ON_A_MACHINE.items():
        yield f"{alert} on a machine", MACHINE | fault, alert
    for phase in set(GroupPhase) - {GroupPhase.SERVING}:
        down = None if phase in RESTING else "DSV4GroupNotServing"
        expected = "DSV4RecoveryExhausted" if phase is GroupPhase.FAILED else down
        yield f"phase {phase}", HEALTHY | phases(phase) | AWAY, expected
        if phase in RESTING or phase is GroupPhase.FAILED:
            yield f"phase {phase} without an agent", HEALTHY | phases(phase) | AWAY | SILENT, expected
    quiet = {name: values for name, values in HEALTHY.items() if "recent_failures" not in name}
    for cause in Cause:
        found = BY_CAUSE.get(cause)
        yield f"cause {cause}", quiet | {of_group("dsv4_group_recent_failures", cause=cause): "2x180"}, found
        seen = {deployed("dsv4_gateway_engine_recent_failures", pod="a", group=0, cause=cause): "2x180"}
        local = {name: values for name, values in MACHINE.items() if "recent_failures" not in name}
        yield f"cause {cause} on a machine", local | seen, found


def _budget(*, allowed: int, left: int) -> Series:
    return {
        of_group("dsv4_group_restarts_allowed"): f"{allowed}x180",
        of_group("dsv4_group_restarts_left"): f"{left}x180",
    }


def test_the_rules_are_valid() -> None:
    assert f"SUCCESS: {len(monitoring.alerts())} rules found" in promtool(
        "check", "rules", "--lint=all", monitoring.ALERTS
    )


def test_every_fault_has_its_alert_and_no_other(tmp_path: Path) -> None:
    assert list(FAULTS) == [rule["alert"] for rule in monitoring.alerts()]
    tests = [
        {
            "name": name,
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in given.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "150m",
                    "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else [],
                }
            ],
        }
        for name, given, alert in cases()
    ]
    assert len(tests) > 100
    file = tmp_path / "tests.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(monitoring.ALERTS)], "evaluation_interval": "2m", "tests": tests})
    )
    promtool("test", "rules", file)


def test_a_missing_alert_and_a_further_one_fail_the_test(tmp_path: Path) -> None:
    """The tests above can fail: a missing and an additional alert are detected."""
    for given, expected in ((HEALTHY, "DSV4RequestsHeld"), (HEALTHY | FAULTS["DSV4RequestsHeld"][0], None)):
        test = {
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in given.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "150m",
                    "exp_samples": [{"labels": f'{{alertname="{expected}"}}', "value": 1}] if expected else [],
                }
            ],
        }
        file = tmp_path / "tests.yaml"
        file.write_text(yaml.safe_dump({"rule_files": [str(monitoring.ALERTS)], "tests": [test]}))
        with pytest.raises(AssertionError, match="FAILED"):
            promtool("test", "rules", file)


def test_the_configuration_without_kubernetes_is_valid() -> None:
    file = monitoring.ROOT / "examples" / "monitoring" / "prometheus.yaml"
    assert "SUCCESS" in promtool("check", "config", file)


@contextlib.contextmanager
def exporters() -> Iterator[dict[str, int]]:
    """Serve the metrics of every exporter; yield the port of each."""

    def handler(name: str) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(monitoring.exported()[name])

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    servers = {name: ThreadingHTTPServer(("127.0.0.1", 0), handler(name)) for name in monitoring.exported()}
    for server in servers.values():
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {name: server.server_address[1] for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.shutdown()
            server.server_close()


LABELS: dict[str, dict[str, str]] = {
    "operator": {},
    "agent": {"namespace": "models", "deployment": "flash", "group": "0", "rank": "0"},
    "gateway": {"namespace": "models", "deployment": "flash", "gateway_group": "0"},
}
"""Labels from the chart."""


def test_a_running_prometheus_has_data_for_every_panel(tmp_path: Path) -> None:
    with exporters() as ports, prometheus.running(tmp_path, ports, LABELS, monitoring.ALERTS) as url:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                if len(prometheus.ask(url, "count_over_time(up[1m]) >= 3 and up == 1")) == len(ports):
                    break
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.5)
        empty = [where for where, query in monitoring.queries() if not prometheus.ask(url, query)]
        firing = [one["metric"]["alertname"] for one in prometheus.ask(url, 'ALERTS{alertstate="firing"}')]
    assert empty == []
    # The certificate of these metrics expires in a day.
    assert firing == ["DSV4WebhookCertificateExpires"]
