"""A system under test: dsv4 here, bare vLLM in `bare`. It is assessed by behaviour that is visible to users."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from dsv4_operator.cli.output import log_time
from dsv4_testkit.faults.actions import Scene
from dsv4_testkit.faults.table import Fault
from dsv4_testkit.harness import Deployment, unix

MODEL = "nano"
HOOK = "DSV4_FAULT_FILE"
_LAST_WORD_SECONDS = 1.5
"""Maximum time between two reports of a running member."""
_READY_SECONDS = 240.0
_ORDER = ("detected", "cause", "evidence", "repair", "serving")
_LOG_SECONDS = 10.0
_ROUND_SECONDS = 1.0
"""Times in reports are rounded to seconds."""


@dataclass(frozen=True)
class Verdict:
    """A death as reported by the system."""

    time: float
    """Unix time of detection."""
    cause: str | None = None
    """None: no cause is reported."""
    culprit: int | None = None
    level: int | None = None
    by: str = ""
    recovered: float | None = None
    """Unix time of the next verified completion."""
    message: str = ""


class System(Scene, Protocol):
    """One running system with two members."""

    name: str
    patience: float
    """Seconds after which an undetected fault counts as missed."""

    @property
    def api(self) -> int:
        """The published port."""

    def start(self) -> None:
        """Start the system and return once it serves."""

    def ready(self) -> None:
        """Return once the system responds and is settled; start it anew if it does not recover."""

    def verdicts(self, since: float) -> list[Verdict]:
        """Return the deaths detected after a Unix time, oldest first."""

    def settled(self) -> bool:
        """Return whether the system reports that it serves."""

    def restarts(self) -> int | None:
        """Return the number of restarts of every level so far; None if they are not counted."""

    def replayed(self) -> Mapping[str, float] | None:
        """Return the number of replayed requests of each gateway so far; None without replays."""

    def disorder(self, since: float) -> str:
        """Return the events out of order (detected, cause, evidence, repair, serving) in a report of the repair.

        Only events after a Unix time count. The result is empty if all are in order, or if there are no such reports.
        """

    def heal(self, fault: Fault) -> None:
        """Remove the effects of an undetected fault, so that the next run starts from a serving system."""

    def close(self) -> None:
        """Stop the system with all its processes."""


class DSV4:
    """A deployment of dsv4 with two local members."""

    name = "dsv4"
    patience = 90.0

    def __init__(self, weights: Path | None = None, *, restarts: int = 100, window: str = "1m") -> None:
        """Create the system; by default each minute restores the restart budget, because no fault tests the budget."""
        self._weights = weights
        self._budget = {"restarts": restarts, "window": window}
        self._seen: dict[float, float] = {}
        """Unix time at which each death, by its time, was first seen in the status."""
        self.deployment: Deployment | None = None

    def start(self) -> None:
        found = Deployment(MODEL, weights=self._weights, **self._budget)
        found.environment[HOOK] = str(found.root / "order")
        self.deployment = found
        found.up()

    @property
    def _there(self) -> Deployment:
        assert self.deployment is not None, "not started"
        return self.deployment

    @property
    def api(self) -> int:
        return self._there.api

    @property
    def hook(self) -> Path:
        return self._there.root / "order"

    @property
    def network(self) -> int:
        return int((self._there.directory / "lock").read_text())

    def group(self) -> dict[str, Any]:
        """Return the group's status."""
        return dict(self._there.peek()["groups"][0])

    def pid(self, rank: int, process: str) -> int:
        if process == "member":
            # The supervisor of the member's first process.
            return int(psutil.Process(self.init(rank)).ppid())
        return self._there.pid(rank, process)

    def init(self, rank: int) -> int:
        return self.pid(rank, "agent")

    def port(self, rank: int) -> str:
        return f"m{self.group()['incarnation']}.{rank}"

    def ready(self) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            if self.settled() and answers(self.api):
                return
            time.sleep(0.5)
        print(f"  {self.name} does not come back; started anew\n{self._there.log()[-1500:]}", flush=True)
        self.close()
        self.start()

    def verdicts(self, since: float) -> list[Verdict]:
        found = []
        for failure in self.group().get("history", ()):
            died = unix(failure["time"])
            # A member that stopped reporting counts as dead since its last report, which may be before the fault.
            if died > since - _LAST_WORD_SECONDS:
                seen = self._seen.setdefault(died, time.time())
                noticed = died if died > since else seen
                repair = failure.get("recoverSeconds")
                found.append(
                    Verdict(
                        noticed,
                        failure["cause"],
                        failure.get("culpritRank"),
                        failure.get("level"),
                        failure.get("detectedBy", ""),
                        None if repair is None else died + repair,
                        failure.get("message", ""),
                    )
                )
        return sorted(found, key=lambda verdict: verdict.time)

    def settled(self) -> bool:
        return bool(self._there.peek()["phase"] == "Serving")

    def restarts(self) -> int:
        return int(self.group().get("totalRestarts", 0))

    def replayed(self) -> Mapping[str, float] | None:
        return scrape(self.api, "dsv4_gateway_replayed_total")

    def disorder(self, since: float) -> str:
        found = self._there
        why = found.run("why", found.name, timeout=60.0).stdout
        rows = [line.split()[0] for line in why.splitlines() if line.startswith("  ") and line[2:3] != " "]
        if (order := [row for row in rows if row in _ORDER]) != list(_ORDER):
            return f"why: {order}"
        last = self.group()["lastFailure"]
        if unix(last["time"]) + last["recoverSeconds"] > unix(self.group()["readyTime"]) + _ROUND_SECONDS:
            return (
                f"status: repaired at {last['time']} + {last['recoverSeconds']} s, ready at {self.group()['readyTime']}"
            )
        # Events in the log of the loop, which saves the status before it logs them.
        steps = ("EngineDead", "GroupDead"), ("EngineRestarting", "GroupForming"), ("GroupRecovered",)
        deadline = time.monotonic() + _LOG_SECONDS
        while problem := _in_order(
            [line for line in found.log().splitlines() if _unix_of(line) >= since - _ROUND_SECONDS], *steps
        ):
            if time.monotonic() > deadline:
                return f"events: {problem}"
            time.sleep(0.5)
        logs = found.run("logs", found.name, timeout=60.0).stdout.splitlines()
        times = [
            when for line in logs if "agent]" in line and (when := log_time(line.encode(), time.localtime().tm_mon))
        ]
        if times != sorted(times):
            return "logs: the lines of the agents are not in the order of their times"
        return ""

    def heal(self, fault: Fault) -> None:
        print(f"  {fault.name} was not noticed; killing the engine so that the suite can go on", flush=True)
        for rank, process in ((1, "worker"), (0, "worker"), (0, "engine-core"), (0, "api")):
            try:
                os.kill(self.pid(rank, process), signal.SIGKILL)
            except (RuntimeError, ProcessLookupError):
                continue
        time.sleep(5.0)

    def close(self) -> None:
        if self.deployment is not None:
            self.deployment.destroy()
            self.deployment = None


def _unix_of(line: str) -> float:
    """Return the time of a line of the loop's log; 0 if it has none."""
    try:
        return time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S"))
    except ValueError:
        return 0.0


def _in_order(lines: Sequence[str], *steps: tuple[str, ...]) -> str:
    """Return the first step without a line after that of the previous step; empty if all are in order."""
    at = 0
    for step in steps:
        found = next((i for i in range(at, len(lines)) if any(f" {word}: " in lines[i] for word in step)), None)
        if found is None:
            return f"no {' or '.join(step)} in order"
        at = found
    return ""


def answers(port: int, timeout: float = 30.0) -> bool:
    """Return whether a valid completion is returned."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return bool(json.load(response)["usage"]["completion_tokens"] == 2)
    except (OSError, ValueError, KeyError):
        return False


def scrape(port: int, name: str) -> dict[str, float] | None:
    """Return a metric's value of each gateway by its labels; None without a response or if the metric is missing."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as response:
            text = response.read().decode()
    except OSError:
        return None
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return {labels: float(value) for labels, value in samples} or None


def increase(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> float | None:
    """Return the increase of a counter over all gateways; a new gateway's begins at 0. None: unknown."""
    if before is None or after is None:
        return None
    known = {labels: value for labels, value in before.items() if value <= after.get(labels, 0.0)}
    return sum(value - known.get(labels, 0.0) for labels, value in after.items())
