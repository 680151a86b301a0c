"""The peer: same model, flags and kind of members, with restart loops and `/health` instead of dsv4."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from dsv4_runtime.agent.processes import role_of
from dsv4_testkit.faults.actions import inside
from dsv4_testkit.faults.system import HOOK, Verdict, answers
from dsv4_testkit.faults.table import Fault
from dsv4_testkit.waiting import free_port

_START_SECONDS = 300.0
_BACK_SECONDS = 120.0
_PROBE_SECONDS, _PROBE_TIMEOUT = 1.0, 5.0
_API_WORDS = "vllm.entrypoints.openai.api_server"


class Bare:
    """vLLM under Ray on two members; each program runs in a loop that restarts it after its exit."""

    name = "bare vLLM"
    patience = 120.0

    def __init__(self, weights: Path | None = None) -> None:
        self._weights = weights
        self._host: subprocess.Popen[bytes] | None = None
        self._probe: _Probe | None = None
        self.root = Path()
        self.api = 0

    def start(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="d4-"))
        self.api = free_port()
        model = self._model()
        script = Path(__file__).with_name("bare_host.py")
        with (self.root / "host.log").open("wb") as log:
            self._host = subprocess.Popen(
                [sys.executable, str(script), "host", str(self.root), str(model), str(self.api)],
                env={**os.environ, HOOK: str(self.hook)},
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not answers(self.api):
            if self._host.poll() is not None or time.monotonic() > deadline:
                logs = {path.name: path.read_text(errors="replace")[-1500:] for path in self.root.glob("*.log")}
                raise RuntimeError(f"bare vLLM did not start: {logs}")
            time.sleep(0.5)
        self._probe = _Probe(self.api)

    def _model(self) -> Path:
        if self._weights is not None:
            return next(self._weights.glob("nano-*"))
        folder = self.root / "weights" / "nano"
        subprocess.run([sys.executable, "-m", "dsv4_runtime.nano.checkpoint", str(folder)], check=True, timeout=300)
        return folder

    @property
    def hook(self) -> Path:
        return self.root / "order"

    @property
    def network(self) -> int:
        assert self._host is not None
        return self._host.pid

    def _member(self, rank: int) -> dict[str, int | str]:
        return dict(json.loads((self.root / f"m{rank}.json").read_text()))

    def init(self, rank: int) -> int:
        return int(self._member(rank)["init"])

    def port(self, rank: int) -> str:
        return str(self._member(rank)["port"])

    def pid(self, rank: int, process: str) -> int:
        if process == "member":
            return int(self._member(rank)["member"])
        found = []
        for pid in inside(self.init(rank)):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if role_of(words) == process or (process == "api" and _API_WORDS in words):
                found.append(pid)
        if not found:
            raise RuntimeError(f"bare vLLM has no {process} on rank {rank}")
        # Children have their parent's title until they execute another program.
        return min(found)

    def ready(self) -> None:
        deadline = time.monotonic() + _BACK_SECONDS
        while time.monotonic() < deadline:
            if answers(self.api):
                return
            time.sleep(0.5)
        self._anew("it does not answer")

    def verdicts(self, since: float) -> list[Verdict]:
        """Return the first exit of vLLM or of a member, or `/health` status other than 200, as one death."""
        assert self._probe is not None
        found = [(bad, "health") for bad in self._probe.bad if bad > since]
        exits = self.root / "exits"
        for line in exits.read_text().splitlines() if exits.exists() else ():
            when, what, _ = json.loads(line)
            if when > since:
                found.append((when, f"exit of {what}"))
        if not found:
            return []
        when, by = min(found)
        return [Verdict(when, by=by, recovered=self._probe.good_since(when))]

    def settled(self) -> bool:
        assert self._probe is not None
        return self._probe.good

    def restarts(self) -> int | None:
        return None

    def replayed(self) -> None:
        return None

    def disorder(self, since: float) -> str:
        return ""

    def heal(self, fault: Fault) -> None:
        self._anew(f"{fault.name} was not noticed")

    def _anew(self, why: str) -> None:
        print(f"  {self.name}: {why}; started anew by hand", flush=True)
        self.close()
        self.start()

    def close(self) -> None:
        if self._probe is not None:
            self._probe.end()
        if self._host is not None:
            # The kernel ends the members with the host process.
            self._host.kill()
            self._host.wait(15)
        self._probe = self._host = None
        if self.root != Path():
            time.sleep(1.0)
            shutil.rmtree(self.root, ignore_errors=True)
            self.root = Path()


class _Probe:
    """Requests `/health` once a second."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/health"
        self.good = True
        self.bad: list[float] = []
        self._turned_good = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(_PROBE_SECONDS):
            try:
                with urllib.request.urlopen(self._url, timeout=_PROBE_TIMEOUT) as response:
                    good = response.status == 200
            except OSError:
                good = False
            if good and not self.good:
                self._turned_good = time.time()
            if not good:
                self.bad.append(time.time())
            self.good = good

    def good_since(self, when: float) -> float | None:
        """Return the time at which `/health` was 200 again after the death at `when`; None if it is not."""
        return self._turned_good if self.good and self._turned_good > when else None

    def end(self) -> None:
        """Stop the requests."""
        self._end.set()
        self._thread.join(_PROBE_TIMEOUT + 2 * _PROBE_SECONDS)
