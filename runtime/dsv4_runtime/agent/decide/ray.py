"""A Ray node that was stopped: it neither ends nor answers, and Ray itself notices only after a minute.

The kernel says which processes are stopped (state T), so a machine that is merely busy is never taken for one.
"""

from __future__ import annotations

from dataclasses import replace

from dsv4_runtime.agent.decide.events import Now, RayLost
from dsv4_runtime.agent.decide.state import MemberState
from dsv4_runtime.contract import Cause

_CAUSES = {"raylet": Cause.RAYLET_HUNG, "gcs": Cause.RAY_HEAD_HUNG}


def look(state: MemberState, now: Now) -> tuple[MemberState, RayLost | None]:
    """Return the state with what its latest signals say of this member's Ray node, and that it is lost if it is."""
    signals = state.view.signals
    stopped = [one.name for one in signals.processes if one.name in _CAUSES and one.state == "T"] if signals else []
    # An agent that stood still itself may have been stopped together with Ray, and be the first to go on.
    since = {name: max(dict(state.ray_stopped).get(name, now.clock), now.awake) for name in stopped}
    state = replace(state, ray_stopped=tuple(since.items()))
    for name, began in since.items():
        if (seconds := now.clock - began) >= state.plan.health.stopped:
            message = f"the {name} process of rank {state.rank} is stopped (state T) since {seconds:.1f} s"
            return state, RayLost(_CAUSES[name], message, "process")
    return state, None
