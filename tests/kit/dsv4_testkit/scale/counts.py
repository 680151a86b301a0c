"""What is counted: processor time and memory of processes by the kernel, requests by the API server itself."""

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
    """Has the API server count the requests of one service account apart, at the priority that it has anyway."""
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
    """Requests since the API server started, as its /metrics has them."""

    by_schema: Counter[str]
    """Of the accounts with a flow schema, by its name."""
    writes: Counter[tuple[str, str]]
    """Of everybody, by verb and resource."""
    everybodys: float

    def since(self, earlier: Requests) -> Requests:
        """Those that came after `earlier`."""
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
    """What the API server has counted so far.

    Args:
        http: speaks to it as somebody who may read /metrics.
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
    """Name to process id of the processes that `pid` started."""
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
    """Processor time of a process that runs, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def mebibytes(pid: int, what: str = "VmRSS") -> int:
    """Resident memory of a process; `VmHWM`: the most that it ever was."""
    found = re.search(rf"{what}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1024 if found else 0
