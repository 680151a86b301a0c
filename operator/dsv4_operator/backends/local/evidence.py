"""Evidence kept of an incarnation that ended badly: enough to say why, little enough to keep, never a prompt."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.lifecycle.observed import ObservedMember
from dsv4_runtime.util.log_lines import without_client_text

_TAIL_BYTES = 256 * 1024
_RAY_FILES = 60
# As many as the agent keeps of deaths that it mends itself, in the same directory.
_KEEP = 10


def collect(
    state: DeploymentState, group: int, incarnation: int, members: Iterable[ObservedMember], *, deadline: float
) -> Path | None:
    """Copy plan, statuses and the ends of all logs; None when the incarnation left nothing.

    Args:
        state: of the deployment.
        group: whose incarnation.
        incarnation: which.
        members: as last observed.
        deadline: monotonic time after which no further file is begun; what is there by then is kept.
    """
    source = state.incarnation(incarnation, group)
    if not source.is_dir():
        return None
    target = state.evidence(group) / f"{incarnation}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "plan.json", target)
    for member in members:
        if member.incarnation == incarnation:
            seen = {
                "rank": member.rank,
                "node": member.node,
                "started": member.started,
                "ended": member.ended,
                "endedTime": member.ended_time,
                "heard": member.heard,
                "status": member.status.to_dict() if member.status else None,
            }
            (target / f"m{member.rank}-status.json").write_text(json.dumps(seen, indent=2) + "\n")
    for directory in sorted(source.glob("m*")):
        for log in sorted(directory.glob("*.log")):
            _copy_tail(log, target / f"{directory.name}-{log.name}", deadline)
        ray = sorted((directory / "ray").glob("session_*/logs/*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for log in [path for path in ray if path.is_file() and path.stat().st_size > 0][:_RAY_FILES]:
            _copy_tail(log, target / f"{directory.name}-ray" / log.name, deadline)
    _retain(state.evidence(group))
    return target


def _copy_tail(source: Path, target: Path, deadline: float) -> None:
    if time.monotonic() > deadline:
        return
    target.parent.mkdir(exist_ok=True)
    with source.open("rb") as file:
        size = source.stat().st_size
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES)
    if source.name == "vllm.log" or source.name.startswith("worker-"):
        # vLLM logs what clients send, which is not kept.
        lines = tail.decode(errors="replace").replace("\r\n", "\n").split("\n")
        tail = "".join(f"{line}\n" for line in without_client_text(lines) if line).encode()
    target.write_bytes(tail)


def _retain(directory: Path) -> None:
    """Remove all but the newest: a restart loop must not fill the disk."""
    for old in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime)[:-_KEEP]:
        shutil.rmtree(old, ignore_errors=True)
