"""Samples of the head before a death or during a survived fault, stored as a series for the tests of the rules."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dsv4_runtime.contract import HealthPolicy
from dsv4_runtime.health.rules import WINDOW_SECONDS, judge
from dsv4_runtime.health.samples import RankView, Sample
from dsv4_testkit.faults.judge import Result
from dsv4_testkit.faults.system import DSV4

# A death is at the end of the window; a survived fault may be at its beginning.
_BEFORE_DEATH = 30.0
_BEGIN = 1000.0
_TIMES = frozenset({"time", "answered", "stepped", "canary_sent", "heard"})
_ASK = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]})
sys.stdout.write(urllib.request.urlopen(request, timeout=5).read().decode())
"""


def keep(system: DSV4, result: Result, directory: Path) -> Path | None:
    """Write the last samples of a run in the format of `tests/unit/health/test_series.py`.

    Returns None if no rule detected the fault: the kernel's report of a process's end is not a sample.
    """
    if result.missed:
        return None
    window = _now(system) if result.verdict == "Healthy" else _at_death(system, result)
    samples = TypeAdapter(list[Sample]).validate_python(window)
    if not samples or judge(samples, HealthPolicy(), samples[-1].time).cause != result.cause:
        return None
    expected = {"health": result.verdict, "cause": result.cause, "culprit": result.culprit}
    seconds = WINDOW_SECONDS if result.verdict == "Healthy" else _BEFORE_DEATH
    lines = ",\n".join(json.dumps(sample, separators=(",", ":")) for sample in trimmed(window, seconds))
    words = "".join(letter if letter.isalnum() else " " for letter in result.fault.lower()).split()
    target = directory / f"{'-'.join(words)}.json"
    target.write_text(f'{{"expected":{json.dumps(expected)},\n"samples":[\n{lines}\n]}}\n')
    return target


def trimmed(window: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return the last `seconds` of samples; times begin at a round number, fields with default values are omitted."""
    late = [sample for sample in window if sample["time"] >= window[-1]["time"] - seconds]
    shift = _BEGIN - late[0]["time"]
    return [_lean(sample, Sample, shift) for sample in late]


def _lean(entry: dict[str, Any], kind: type[Any], shift: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(kind):
        value = entry[field.name]
        if field.name == "ranks":
            found["ranks"] = [_lean(rank, RankView, shift) for rank in value]
        elif field.name in _TIMES and value is not None:
            found[field.name] = round(value + shift, 3)
        elif field.name == "processes" or value != field.default:
            found[field.name] = round(value, 4) if isinstance(value, float) else value
    return found


def _now(system: DSV4) -> list[dict[str, Any]]:
    """Return the last minute of samples from the head's agent."""
    assert system.deployment is not None
    token = (system.deployment.directory / "token").read_text().strip()
    address = next(member["address"] for member in system.group()["members"] if member["rank"] == 0)
    words = ["nsenter", f"--net=/proc/{system.network}/ns/net", sys.executable, "-c", _ASK]
    url = f"http://{address}:8090/v1/evidence"
    done = subprocess.run([*words, url, token], capture_output=True, text=True, timeout=15, check=True)
    return list(json.loads(done.stdout)["window"])


def _at_death(system: DSV4, result: Result) -> list[dict[str, Any]]:
    """Return the head's stored samples of the first death after the fault."""
    assert system.deployment is not None
    for path in sorted(system.deployment.directory.glob("**/evidence.json"), key=lambda path: path.stat().st_mtime):
        found = json.loads(path.read_text())
        if path.stat().st_mtime > result.struck and found.get("failure", {}).get("cause") == result.cause:
            return list(found.get("window", ()))
    return []
