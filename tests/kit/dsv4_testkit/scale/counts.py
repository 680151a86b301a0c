"""Counters: processor time and memory of processes from the kernel, requests from the API server."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

_TICKS = os.sysconf("SC_CLK_TCK")
_SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_WRITES = frozenset({"POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"})

OPERATOR, KUBERAY = "scale-operator", "scale-kuberay"
"""Names of the flow schemas."""


def flow_schema(name: str, namespace: str, account: str) -> dict[str, Any]:
    """Return a flow schema that counts the requests of one service account separately, at their default priority."""
    subject = {"kind": "ServiceAccount", "serviceAccount": {"namespace": namespace, "name": account}}
    anything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": True, "namespaces": ["*"]}
    return {
        "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
        "kind": "FlowSchema",
        "metadata": {"name": name},
        "spec": {
            "priorityLevelConfiguration": {"name": "workload-low"},
            "matchingPrecedence": 1000,
            "distinguisherMethod": {"type": "ByUser"},
            "rules": [
                {
                    "subjects": [subject],
                    "resourceRules": [anything],
                    "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
                }
            ],
        },
    }


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests since the start of the API server, from its /metrics."""

    by_schema: Counter[str]
    """Requests of the accounts with a flow schema, by its name."""
    writes: Counter[tuple[str, str]]
    """Writes of all clients, by verb and resource."""
    everybodys: float

    def since(self, earlier: Requests) -> Requests:
        """Return the difference to `earlier`."""
        writes = Counter(self.writes)
        writes.subtract(earlier.writes)
        by_schema = Counter(self.by_schema)
        by_schema.subtract(earlier.by_schema)
        return Requests(
            by_schema,
            Counter({what: count for what, count in writes.items() if count}),
            self.everybodys - earlier.everybodys,
        )


def requests(http: httpx.Client) -> Requests:
    """Return the API server's counts so far.

    Args:
        http: client of an account with access to /metrics.
    """
    by_schema, everybodys, writes = Counter[str](), 0.0, Counter[tuple[str, str]]()
    for name, labels, value in _samples(http.get("/metrics").raise_for_status().text):
        if name == "apiserver_flowcontrol_dispatched_requests_total":
            by_schema[labels["flow_schema"]] += int(value)
        elif name == "apiserver_request_total":
            everybodys += value
            if labels["verb"] in _WRITES:
                writes[labels["verb"], labels["resource"]] += int(value)
    return Requests(by_schema, writes, everybodys)


def _samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    wanted = ("apiserver_request_total", "apiserver_flowcontrol_dispatched_requests_total")
    found = (_SAMPLE.match(line) for line in text.splitlines() if line.startswith(wanted))
    return [(one[1], dict(_LABEL.findall(one[2])), float(one[3])) for one in found if one]


def children(pid: int) -> dict[str, int]:
    """Return the children of `pid` as process ids by name."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(") ")
        except OSError:
            continue
        if int(rest.split()[1]) == pid:
            found[name] = int(stat.parent.name)
    return found


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a running process, over all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def mebibytes(pid: int, what: str = "VmRSS") -> int:
    """Return a process's resident memory in MiB; `VmHWM`: its maximum so far."""
    found = re.search(rf"{what}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1024 if found else 0
