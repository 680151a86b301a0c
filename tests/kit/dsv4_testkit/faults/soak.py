"""Long operation without a death.

Phases: saturation, long prefills, contention for processors, bursts, pauses with canaries, and losses of all frames of
a link for 8 s.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from dsv4_testkit.faults.actions import Loss
from dsv4_testkit.faults.load import Load, Outcome, Request, Shape, counts
from dsv4_testkit.faults.own import Own
from dsv4_testkit.faults.store import Store
from dsv4_testkit.faults.system import DSV4, MODEL

_PHASE_SECONDS = 45.0
_SAMPLED = 0.5
"""Minimum number of the agent's responses per second of the soak."""
_SATURATED = Shape(clients=12)
"""Three times as many as the engine processes concurrently."""
_PREFILLS = Shape(clients=6, prompt_words=(205, 215), tokens=(2, 8), chat=0.0)
"""About 900 tokens each: close to the 1024 tokens of the longest context, and longer than the 512 of one step."""

_BURST = Shape(clients=24, prompt_words=(4, 60), tokens=(1, 8))
_BURST_SECONDS, _BETWEEN_SECONDS = 4.0, 5.0
_BUSY = "while True: pass"

# Runs in the loop's network namespace: requests the status of the head's agent once a second and prints it.
_WATCH = """
import json, sys, time, urllib.request
url, token = sys.argv[1:]
while True:
    try:
        request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
        with urllib.request.urlopen(request, timeout=3) as response:
            status = json.load(response)
        print(json.dumps([status["verdict"]["health"], status["verdict"]]), flush=True)
    except OSError as error:
        print(json.dumps(["unreachable", str(error)]), flush=True)
    time.sleep(1)
"""


class Watch:
    """Status of the head's agent, once a second, with the current phase."""

    def __init__(self) -> None:
        self.phase = ""
        self.said: list[tuple[str, str, Any]] = []
        """(phase, health or `unreachable`, the status or the error)."""

    def follow(self, lines: Iterable[str]) -> None:
        """Read until the end."""
        for line in lines:
            health, status = json.loads(line)
            self.said.append((self.phase, health, status))

    def count(self, *healths: str, during: str | None = None) -> int:
        """Return the number of samples with one of `healths`, in one phase or in all."""
        return sum(health in healths and during in (None, phase) for phase, health, _ in self.said)

    def first(self, *healths: str) -> list[Any]:
        """Return the first three samples with one of `healths`."""
        return [status for _, health, status in self.said if health in healths][:3]


def soak(system: DSV4, minutes: float, seed: int, store: Store) -> int:
    """Run the soak and store the result; return 1 if a part was declared dead or restarted, or a request failed."""
    try:
        system.start()
        system.ready()
        entry = _run(system, minutes * 60.0, seed)
    finally:
        system.close()
    store.note("soaks", entry)
    print(json.dumps(entry, indent=1))
    # Too few responses prove nothing: the observing process died, or the agent was too slow.
    watched = entry["samples"] >= minutes * 60.0 * _SAMPLED
    wrong = ("dead", "restarts", "ownRestarts", "failed", "silent")
    return int(not watched or any(entry[each] for each in wrong))


def _run(system: DSV4, seconds: float, seed: int) -> dict[str, Any]:
    begun, before, own = time.time(), system.restarts(), _own(system)
    watch = Watch()
    done: list[Request] = []
    number = dict.fromkeys(("saturation", "prefills", "contention", "bursts", "pauses", "losses"), 0)
    with _following(system, watch):
        for turn in itertools.count():
            for phase in number:
                left = begun + seconds - time.time()
                if left <= 0:
                    break
                number[phase] += 1
                watch.phase = phase
                print(
                    f"{(time.time() - begun) / 60:.1f} min: {phase}; so far {watch.count('Dead')} s dead,"
                    f" {watch.count('Suspect')} s suspect",
                    flush=True,
                )
                if phase == "pauses":
                    time.sleep(min(_PHASE_SECONDS, left))
                    continue
                if phase == "bursts":
                    done += _bursts(system, min(_PHASE_SECONDS, left), f"{seed}/{turn}")
                    continue
                shape = _PREFILLS if phase in ("prefills", "contention") else _SATURATED
                busy = _busy() if phase == "contention" else contextlib.nullcontext()
                with busy, Load(system.api, MODEL, shape, f"{seed}/{turn}/{phase}") as load:
                    if phase == "losses":
                        time.sleep(5.0)
                        Loss(1, 8.0).strike(system)()
                    time.sleep(min(_PHASE_SECONDS, left))
                    done += load.stop()
            else:
                continue
            break
    found = counts(done)
    return {
        "struck": begun,
        "minutes": (time.time() - begun) / 60,
        **number,
        "samples": watch.count("Healthy", "Suspect", "Dead", "Starting"),
        "unreachable": watch.count("unreachable"),
        "dead": watch.count("Dead"),
        "suspect": watch.count("Suspect"),
        # A member without reports for seconds makes the engine suspect, as intended.
        "suspectInLosses": watch.count("Suspect", during="losses"),
        "first": watch.first("Dead", "Suspect"),
        "restarts": system.restarts() - before,
        "ownRestarts": len(own - _own(system)),
        "sent": len(done),
        "failed": found[Outcome.FAILED] + found[Outcome.ENDED],
        "silent": found[Outcome.SILENT],
        "errors": list(dict.fromkeys(r.detail[:200] for r in done if r.outcome is not Outcome.ANSWERED))[:5],
    }


def _own(system: DSV4) -> frozenset[int]:
    """Return the processes of loop and gateways, which a false verdict replaces."""
    return frozenset((*Own.LOOP.find(system), *Own.GATEWAY.find(system)))


def _bursts(system: DSV4, seconds: float, seed: str) -> list[Request]:
    """Run alternating phases: many clients for a few seconds, then none."""
    done: list[Request] = []
    until = time.monotonic() + seconds
    for number in itertools.count():
        with Load(system.api, MODEL, _BURST, f"{seed}/burst/{number}") as load:
            time.sleep(_BURST_SECONDS)
            done += load.stop()
        if time.monotonic() + _BETWEEN_SECONDS >= until:
            return done
        time.sleep(_BETWEEN_SECONDS)
    return done


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Run two busy processes per processor."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


@contextlib.contextmanager
def _following(system: DSV4, watch: Watch) -> Iterator[None]:
    """Record the status of the head's agent once a second."""
    assert system.deployment is not None
    token = (system.deployment.directory / "token").read_text().strip()
    address = next(member["address"] for member in system.group()["members"] if member["rank"] == 0)
    asker = subprocess.Popen(
        [
            *("nsenter", f"--net=/proc/{system.network}/ns/net", sys.executable, "-c", _WATCH),
            *(f"http://{address}:8090/v1/status", token),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asker.stdout is not None
    output = asker.stdout
    reader = threading.Thread(target=watch.follow, args=(output,), daemon=True)
    reader.start()
    try:
        yield
    finally:
        asker.kill()
        asker.wait(10)
        reader.join(10)
        output.close()
