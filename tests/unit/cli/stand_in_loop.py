"""Stand-in for the loop in tests of `up` and `down`: `stand_in_loop.py ROOT NAME MODE ATTACHED [SEEN]`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.local.state import DeploymentState

STARTED = time.time()
READY = {"type": "Ready", "observedGeneration": 1, "lastTransitionTime": STARTED, "message": ""}
TRUE = {**READY, "status": "True", "reason": "AllGroupsReady"}
FALSE = {**READY, "status": "False", "reason": "GroupsNotReady"}


def member(rank: int, phase: str, message: str = "") -> dict[str, Any]:
    role = "Worker" if rank else "Head"
    return {"rank": rank, "role": role, "address": f"10.88.0.{rank + 10}", "phase": phase, "message": message}


def status(phase: str, conditions: list[dict[str, Any]], group: dict[str, Any]) -> dict[str, Any]:
    ready = conditions[0]["status"] == "True"
    return {
        "phase": phase,
        "conditions": conditions,
        "observedGeneration": 1,
        "readyReplicas": int(ready),
        "expectedReadySeconds": 40,
        "groups": [{"incarnation": 1, **group}],
        **({"endpoint": "http://127.0.0.1:8000/v1", "rayDashboard": "http://127.0.0.1:8265"} if ready else {}),
    }


def save(state: DeploymentState, found: dict[str, Any]) -> None:
    manifest = state.manifest()
    assert manifest
    state.save_object(DSV4Deployment.model_validate({**manifest.to_dict(), "status": found}))
    if len(sys.argv) < 6:
        time.sleep(0.25)
        return
    # Wait until `dsv4 up` has read the object; bounded, because it may have ended.
    text, seen, deadline = state.object_text(), Path(sys.argv[5]), time.monotonic() + 60.0
    while seen.read_text() != text and time.monotonic() < deadline:
        time.sleep(0.01)


def main() -> None:
    state, mode = DeploymentState(Path(sys.argv[1]), sys.argv[2]), sys.argv[3]
    if mode == "busy-port":
        (state.directory / "startup-error").write_text("spec.network.ports.api: port 8000 of 127.0.0.1 is taken\n")
        print("error: port", flush=True)
        sys.exit(2)
    if mode == "traceback":
        raise SystemExit("Traceback\nRuntimeError: it went wrong")
    with state.lock():
        state.incarnation(1).mkdir(exist_ok=True)
        state.token().write_text("secret")
        if mode == "stubborn":
            # Start the child first: it would inherit that the signal is ignored.
            subprocess.Popen(["sleep", "600"])
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if mode == "refused":
            accepted = {**FALSE, "type": "Accepted", "reason": "MemoryShort", "message": "needs 8Gi, 2Gi are free"}
            save(state, status("Failed", [FALSE, accepted], {"phase": "Pending"}))
            time.sleep(600)
        starting = {"phase": "Starting", "members": [member(0, "Staging"), member(1, "Preflight")]}
        save(state, status("Starting", [FALSE], starting))
        if mode == "slow":
            time.sleep(600)
        loading = {"phase": "Starting", "members": [member(0, "Loading", "loading shards 1/2"), member(1, "Joining")]}
        save(state, status("Starting", [FALSE], loading))
        serving = {"phase": "Serving", "members": [member(0, "Serving"), member(1, "Serving")]}
        save(state, status("Serving", [TRUE], serving))
        if mode in ("dies", "gives-up"):
            time.sleep(0.3)
            death = {"time": STARTED, "cause": "EngineCoreDied", "culpritRank": 0, "message": "SIGKILL", "level": 1}
            died = {"lastFailure": death, "history": [death]}
            save(state, status("Degraded", [FALSE], {**serving, **died, "phase": "Restarting"}))
            if mode == "gives-up":
                given_up = {
                    **TRUE,
                    "type": "RecoveryExhausted",
                    "reason": "RecoveryExhausted",
                    "message": "5 of 5 spent",
                }
                save(state, status("Failed", [FALSE, given_up], {**serving, **died, "phase": "Failed"}))
            mended = {**death, "recoverSeconds": 12.34}
            again = {"lastFailure": mended, "history": [mended]}
            save(state, status("Serving", [TRUE], {**serving, **again}))
        while True:
            time.sleep(600)


def end(number: int, frame: object) -> None:
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    main()
