"""Nothing is wrong, for long: saturation, long prefills, pauses with canaries, links that lose everything for 8 s."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from faultlab.actions import Loss
from faultlab.load import Load, Outcome, Request, Shape, counts
from faultlab.store import Store
from faultlab.system import DSV4, MODEL

_PHASE_SECONDS = 45.0
_SAMPLED = 0.5
"""Of the seconds, how many must have an answer of the agent."""
_SATURATED = Shape(clients=12)
"""Three times as many as the engine takes at once."""
_PREFILLS = Shape(clients=6, prompt_words=(205, 215), tokens=(2, 8))
"""About 900 tokens each: close to the 1024 tokens of the longest context, and longer than the 512 of one step."""

# Runs in the loop's network namespace: asks the head's agent once a second and says what it answers.
_WATCH = """
import json, sys, time, urllib.request
url, token = sys.argv[1:]
while True:
    try:
        request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
        with urllib.request.urlopen(request, timeout=3) as response:
            status = json.load(response)
        print(json.dumps([status["verdict"]["health"], status]), flush=True)
    except OSError as error:
        print(json.dumps(["unreachable", str(error)]), flush=True)
    time.sleep(1)
"""


def _unhealthy(said: list[str]) -> list[str]:
    return [line for line in said if json.loads(line)[0] != "Healthy"]


def soak(system: DSV4, minutes: float, seed: int, store: Store) -> int:
    """Run it and keep the result; exit code 1 if anything was called dead or restarted."""
    system.start()
    try:
        system.ready()
        entry = _run(system, minutes * 60.0, seed)
    finally:
        system.close()
    store.note("soaks", entry)
    print(json.dumps(entry, indent=1))
    # Too few answers prove nothing: the watch died, or the agent was too slow to be watched.
    watched = entry["samples"] >= minutes * 60.0 * _SAMPLED
    return int(not watched or bool(entry["unhealthy"] or entry["restarts"] or entry["failed"] or entry["silent"]))


def _run(system: DSV4, seconds: float, seed: int) -> dict[str, Any]:
    begun, before = time.time(), system.restarts()
    said: list[str] = []
    done: list[Request] = []
    number = {"saturation": 0, "prefills": 0, "pauses": 0, "losses": 0}
    with _verdicts(system, said):
        for turn in itertools.count():
            for phase in number:
                left = begun + seconds - time.time()
                if left <= 0:
                    break
                number[phase] += 1
                print(
                    f"{(time.time() - begun) / 60:.1f} min: {phase}, unhealthy so far {len(_unhealthy(said))}",
                    flush=True,
                )
                if phase == "pauses":
                    time.sleep(min(_PHASE_SECONDS, left))
                    continue
                shape = _PREFILLS if phase == "prefills" else _SATURATED
                with Load(system.api, MODEL, shape, f"{seed}/{turn}/{phase}") as load:
                    if phase == "losses":
                        time.sleep(5.0)
                        Loss(1, 8.0).strike(system)()
                    time.sleep(min(_PHASE_SECONDS, left))
                    done += load.stop()
            else:
                continue
            break
    found, unhealthy = counts(done), _unhealthy(said)
    return {
        "struck": begun,
        "minutes": (time.time() - begun) / 60,
        **number,
        "samples": len(said),
        "unhealthy": len(unhealthy),
        "first": unhealthy[:5],
        "restarts": system.restarts() - before,
        "sent": len(done),
        "failed": found[Outcome.FAILED] + found[Outcome.ENDED],
        "silent": found[Outcome.SILENT],
    }


@contextlib.contextmanager
def _verdicts(system: DSV4, into: list[str]) -> Iterator[None]:
    """Collect what the head's agent says while it is not Healthy."""
    assert system.deployment is not None
    token = (system.deployment.directory / "token").read_text().strip()
    address = next(member["address"] for member in system.group()["members"] if member["rank"] == 0)
    watch = subprocess.Popen(
        [
            *("nsenter", f"--net=/proc/{system.network}/ns/net", sys.executable, "-c", _WATCH),
            *(f"http://{address}:8090/v1/status", token),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watch.stdout is not None
    output = watch.stdout
    reader = threading.Thread(target=lambda: into.extend(output), daemon=True)
    reader.start()
    try:
        yield
    finally:
        watch.kill()
        watch.wait(10)
        reader.join(10)
        output.close()
