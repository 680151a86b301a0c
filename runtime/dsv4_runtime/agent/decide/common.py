"""Common part of the decisions of every member: to enter a phase, and to fail."""

from __future__ import annotations

from dataclasses import replace

from dsv4_runtime.agent.decide.actions import (
    AgentAction,
    Enter,
    RecordFailure,
    ReportJoined,
    StartTask,
    Stop,
    StopChildren,
)
from dsv4_runtime.agent.decide.events import Now, Task
from dsv4_runtime.agent.decide.state import MemberState, StepResult
from dsv4_runtime.contract import Failure, Phase

TICK_SECONDS = 0.25
"""Between two looks at what nobody announces."""


def enter(state: MemberState, action: Enter, now: Now) -> tuple[MemberState, Enter]:
    """Return the state in the phase that the action reports, and the action."""
    if action.phase is state.phase:
        return state, action
    return replace(state, phase=action.phase, since=now.clock), action


def fail(state: MemberState, found: Failure) -> StepResult:
    """Return the end of this member: only a new incarnation helps.

    It says so before anything is ended, which may take long: whoever decides what follows need not wait.
    """
    actions: list[AgentAction] = [Stop(tuple(task for task in Task if task is not Task.LISTEN))]
    if found not in state.failures:
        actions.append(RecordFailure(found))
        state = replace(state, failures=(*state.failures, found))
    actions += [ReportJoined(joined=False), Enter(Phase.FAILED, found.message), StopChildren()]
    if state.phase is Phase.PREFLIGHT:
        # The agent did not yet know its address to be there.
        actions.append(StartTask(Task.LISTEN))
    return replace(state, phase=Phase.FAILED, joined=False, engine=None), tuple(actions)
