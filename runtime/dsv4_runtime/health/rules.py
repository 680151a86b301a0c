"""The verdict: pure rules over a window of samples, with the clock as an argument.

Each rule detects one kind of failure and returns `Suspect` before `Dead`. No rule kills on a single probe, and none
kills an engine whose steps advance. The end of a process is certain and needs no rule: the kernel reports it to the
agent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dsv4_runtime.contract import Cause, Health, HealthPolicy, Signals
from dsv4_runtime.health.samples import ENGINE_ROLES, FATAL_XIDS, ProcessView, RankView, Sample, xid_message

WINDOW_SECONDS = 60.0
"""Age of the oldest sample that the rules need."""
GAP_SECONDS = 3.0
"""A larger gap between samples means that the head was stopped; older samples then prove nothing."""
_BEATS_SECONDS = 1.4
_SAMPLE_SECONDS = 1.6
"""Interval after which a heartbeat counts as missing."""
_WANTS_TO_RUN = frozenset("RD")
_STOPPED = frozenset("Tt")
# Follows other deaths more often than it causes one.
_NOISE = frozenset({Cause.NCCL_TIMEOUT})


@dataclass(frozen=True, slots=True)
class Judgement:
    """Verdict of the rules."""

    health: Health
    cause: Cause | None = None
    culprit_rank: int | None = None
    rule: str = ""
    """The rule that fired, as in `Failure.detected_by`."""
    message: str = ""
    since: float = 0.0
    """Beginning of the failure."""


HEALTHY = Judgement(Health.HEALTHY)


def judge(window: Iterable[Sample], policy: HealthPolicy, now: float) -> Judgement:
    """Return the verdict on a serving engine.

    Args:
        window: samples since the engine began to serve, `WINDOW_SECONDS` of them at most, oldest first.
        policy: the thresholds.
        now: monotonic time; not before the newest sample.
    """
    run = _without_gaps(tuple(window))
    if not run or now - run[-1].time > GAP_SECONDS:
        return HEALTHY
    found = [judgement for rule in _RULES if (judgement := rule(run, policy, now)) is not None]
    deaths = [judgement for judgement in found if judgement.health is Health.DEAD]
    return min(deaths or found, key=lambda one: (one.cause in _NOISE, one.since), default=HEALTHY)


def agent_hung(silence: float, accepting: float | None, policy: HealthPolicy, now: float) -> bool:
    """Return whether a member's agent is hung, and its machine is not: a link that comes back brings the agent along.

    Args:
        silence: seconds since the agent's last sign of life.
        accepting: monotonic time since which its machine takes connections, as in `RankView`.
        policy: the thresholds.
        now: monotonic time.
    """
    return accepting is not None and silence >= policy.agent_silent and now - accepting >= policy.agent_silent / 2


def judge_start(
    members: Mapping[int, tuple[Signals, float]],
    stopped: Mapping[tuple[int, str], float],
    progressed: float,
    stage: str,
    policy: HealthPolicy,
    now: float,
) -> Judgement | None:
    """Return the verdict on an engine that starts; None while it progresses.

    Args:
        members: rank to its latest signals and the time at which they arrived.
        stopped: rank and role of the engine's stopped processes, and the time since which they are.
        progressed: time of the start's latest progress in the log, or of its begin.
        stage: that progress.
        policy: the thresholds.
        now: monotonic time.
    """
    for (rank, role), since in sorted(stopped.items(), key=lambda one: one[1]):
        if now - since >= policy.stopped:
            message = f"{_name(role)} on rank {rank} is stopped or frozen since {now - since:.1f} s, during the start"
            return Judgement(Health.DEAD, Cause.ENGINE_HUNG, rank, "start", message, since)
    quiet = start_idle(members, progressed, now)
    if quiet < policy.start_idle:
        return None
    # A process that waits for a device or a file server holds the others up; without one the start shows no culprit.
    blocked = [
        (rank, one.name) for rank, (signals, _) in members.items() for one in signals.processes if one.state == "D"
    ]
    culprit = blocked[0][0] if blocked else None
    what = "".join(f"; {_name(role)} on rank {rank} waits in the kernel (state D)" for rank, role in blocked)
    message = (
        f"the start made no progress for {quiet:.0f} s: no processor, disk or memory is used; its log: {stage}{what}"
    )
    return Judgement(Health.DEAD, Cause.ENGINE_HUNG, culprit, "start", message, now - quiet)


def start_idle(
    members: Mapping[int, tuple[Signals, float]], progressed: float, now: float, *, spinning: bool = True
) -> float:
    """Return the seconds since a start last progressed, by its log or on any member; 0 if that is not measured.

    Args:
        members, progressed, now: as in `judge_start`.
        spinning: whether processor time of the engine's own processes counts, which may spin in vain.
    """
    measured = [(one.idle if spinning else one.stagnant, arrived) for one, arrived in members.values()]
    idle = [seconds + now - arrived for seconds, arrived in measured if seconds is not None]
    return min(now - progressed, *idle) if idle else 0.0


def stopped_since(
    known: Mapping[tuple[int, str], float],
    members: Mapping[int, Signals],
    roles: Container[str],
    now: float,
    awake: float,
) -> dict[tuple[int, str], float]:
    """Return rank and role of each stopped process of `roles`, and the time since which it is.

    Args:
        known: the previous result.
        members: rank to its latest signals.
        roles: as in `ProcessSignals.name`.
        now: monotonic time.
        awake: end of this agent's latest pause. It may have been stopped together with them, and continue first.
    """
    found = {
        (rank, process.name)
        for rank, signals in members.items()
        for process in signals.processes
        if process.name in roles and process.state in _STOPPED
    }
    return {one: max(known.get(one, now), awake) for one in found}


def _name(role: str) -> str:
    names = {
        "api": "vLLM's API process",
        "engine-core": "EngineCore",
        "executor": "vLLM's executor process",
        "gcs": "Ray's GCS",
    }
    return names.get(role, f"the {role}")


def stall_bound(run: Sequence[Sample], policy: HealthPolicy) -> float:
    """Return how long a step may take without any sign of life."""
    learned = policy.stall_factor * (run[-1].pace or 0.0)
    # The fastest heartbeat of the latest three or four: a busy agent answers late, a slow link delays every one. An
    # older one must not count: a link that becomes slow has to raise the bound before the delayed step is called hung.
    fastest: dict[int, float] = {}
    for sample in (sample for sample in run if sample.time > run[-1].time - _BEATS_SECONDS):
        for rank in sample.ranks:
            if rank.round_trip is not None:
                fastest[rank.rank] = min(rank.round_trip, fastest.get(rank.rank, rank.round_trip))
    slow_link = policy.stall_round_trips * max(fastest.values(), default=0.0)
    return min(max(policy.stall_min, learned, slow_link), policy.stall_max)


def _stopped(run: Sequence[Sample], policy: HealthPolicy, now: float) -> Judgement | None:
    """Judge whether a process of the engine is stopped; of several, name the one that was stopped first."""
    stopped = [
        (_since(run, functools.partial(_is_stopped, rank=rank.rank, role=process.role)), rank.rank, process.role)
        for rank in run[-1].ranks
        for process in rank.processes
        if process.state == "T" and process.role in ENGINE_ROLES | {"api"}
    ]
    if not stopped:
        return None
    since, rank, role = min(stopped)
    name = _name(role)
    return _graded(
        now - since,
        policy.stopped / 4,
        policy.stopped,
        cause=Cause.API_SERVER_HUNG if role == "api" else Cause.ENGINE_HUNG,
        culprit_rank=rank,
        rule="process",
        message=f"{name} on rank {rank} is stopped or frozen since {now - since:.1f} s",
        since=since,
    )


def _hung(run: Sequence[Sample], policy: HealthPolicy, now: float) -> Judgement | None:
    """Judge whether work waits, no step ends, and no rank computes.

    The canary is the proof that work waits: vLLM's own numbers of requests stand still when the steps do.
    """
    last = run[-1]
    if last.canary_sent is None or now - last.answered > policy.api_silent / 2:
        return None
    # Idle, the engine owes nothing before the canary; busy, it owes the next step from the last one on.
    owed = last.stepped if last.outstanding and last.stepped > run[0].time else max(last.stepped, last.canary_sent)
    owed = max(owed, run[0].time, _link_recovered(run, policy))
    quiet = max(owed, _last_life(run, policy, _engine_lives))
    bound = stall_bound(run, policy)
    waited, asked = now - quiet, now - last.canary_sent
    if now - owed >= policy.busy_max:
        what, health = f"no step ended for {now - owed:.0f} s although the engine is busy", Health.DEAD
    elif waited >= bound and asked >= policy.canary_patience:
        what, health = f"no step ended for {now - owed:.1f} s and no rank computes (bound {bound:.1f} s)", Health.DEAD
    elif waited >= bound / 2:
        what, health = f"no step ended for {now - owed:.1f} s and no rank computes", Health.SUSPECT
    else:
        return None
    return Judgement(health, Cause.ENGINE_HUNG, _culprit(run), "steps", what, owed)


def _api_hung(run: Sequence[Sample], policy: HealthPolicy, now: float) -> Judgement | None:
    """Judge whether the API process answers nothing and does nothing."""
    answered = max(run[-1].answered, run[0].time)
    if now - answered < policy.api_silent / 2:
        return None
    quiet = max(answered, _last_life(run, policy, _api_lives))
    if now - answered >= policy.busy_max:
        quiet = answered
    return _graded(
        now - quiet,
        policy.api_silent / 2,
        policy.api_silent,
        cause=Cause.API_SERVER_HUNG,
        culprit_rank=0,
        rule="api",
        message=f"vLLM's API process has answered nothing for {now - answered:.1f} s",
        since=answered,
    )


def _lost(run: Sequence[Sample], policy: HealthPolicy, now: float) -> Judgement | None:
    """Judge whether a member is silent: its machine, or its agent alone."""
    rank = min(run[-1].ranks, key=lambda rank: rank.heard, default=None)
    if rank is None:
        return None
    heard = max(rank.heard, run[0].time)
    if agent_hung(now - heard, rank.accepting, policy, now):
        what = (
            f"the agent of rank {rank.rank} last sent a message {now - heard:.1f} s ago; its machine takes connections"
        )
        return Judgement(Health.DEAD, Cause.AGENT_HUNG, rank.rank, "link", what, heard)
    return _graded(
        now - heard,
        policy.link_suspect,
        policy.link_lost,
        cause=Cause.NODE_LOST,
        culprit_rank=rank.rank,
        rule="link",
        message=f"rank {rank.rank} last sent a message {now - heard:.1f} s ago, by heartbeat or answer",
        since=heard,
    )


def _wrong(run: Sequence[Sample], policy: HealthPolicy, now: float) -> Judgement | None:
    """Judge whether the canary's answers are wrong."""
    wrong = run[-1].canary_wrong
    if not wrong:
        return None
    health = Health.DEAD if wrong > 1 else Health.SUSPECT
    since = _since(run, lambda sample: sample.canary_wrong > 0)
    # The answer does not show which rank computed it wrongly.
    return Judgement(
        health, Cause.CANARY_FAILED, None, "completion", f"the canary failed: {run[-1].canary_said}", since
    )


def _says_so(run: Sequence[Sample], policy: HealthPolicy, now: float) -> Judgement | None:
    """Judge whether vLLM's `/health` reports a dead engine while vLLM does not end."""
    if not run[-1].errored:
        return None
    since = _since(run, lambda sample: sample.errored)
    return _graded(
        now - since,
        0.0,
        policy.stopped,
        cause=Cause.ENGINE_CORE_DIED,
        culprit_rank=0,
        rule="api",
        message="vLLM's /health reports a dead engine",
        since=since,
    )


def _xid(run: Sequence[Sample], policy: HealthPolicy, now: float) -> Judgement | None:
    """Judge whether an accelerator's driver reported an error that its programs do not survive."""
    for rank in run[-1].ranks:
        if rank.xid in FATAL_XIDS:
            what = xid_message(rank.rank, rank.xid)
            return Judgement(Health.DEAD, Cause.XID_ERROR, rank.rank, "gpu", what, run[-1].time)
    return None


_HealthRule = Callable[[Sequence[Sample], HealthPolicy, float], Judgement | None]
_RULES: tuple[_HealthRule, ...] = (_stopped, _hung, _api_hung, _lost, _wrong, _says_so, _xid)


def _graded(lasted: float, suspect: float, dead: float, **fields: object) -> Judgement | None:
    """Judge as dead after `dead` seconds, as suspect after `suspect`, else not at all."""
    if lasted < suspect:
        return None
    return Judgement(Health.DEAD if lasted >= dead else Health.SUSPECT, **fields)  # type: ignore[arg-type]


def _without_gaps(window: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples since the head last stood still."""
    for index in range(len(window) - 1, 0, -1):
        if window[index].time - window[index - 1].time > GAP_SECONDS:
            return window[index:]
    return window


def _since(run: Sequence[Sample], holds: Callable[[Sample], bool]) -> float:
    """Return the time of the earliest sample since which `holds` was always true; the newest one's if it never was."""
    since = run[-1].time
    for sample in reversed(run):
        if not holds(sample):
            break
        since = sample.time
    return since


def _is_stopped(sample: Sample, rank: int, role: str) -> bool:
    return any(process.state == "T" for process in _processes(sample, rank) if process.role == role)


def _processes(sample: Sample, rank: int) -> tuple[ProcessView, ...]:
    return next((one.processes for one in sample.ranks if one.rank == rank), ())


def _last_life(
    run: Sequence[Sample], policy: HealthPolicy, lives: Callable[[Sample, Sample, HealthPolicy], bool]
) -> float:
    """Return the time of the latest sample that shows a sign of life; minus infinity if none does."""
    for before, sample in reversed(list(pairwise(run))):
        if lives(before, sample, policy):
            return sample.time
    return float("-inf")


def _engine_lives(before: Sample, sample: Sample, policy: HealthPolicy) -> bool:
    """Return whether any rank computes or has compilers that do.

    With a GPU its power decides about the engine's own processes, because a host that waits for a GPU spins.
    """
    for rank in sample.ranks:
        compilers = (process.below or 0.0 for process in rank.processes if process.role in ENGINE_ROLES)
        if rank.gpu_busy or max(compilers, default=0.0) >= policy.life_share:
            return True
        if rank.gpu_busy is None and _computes(_processes(before, rank.rank), rank, ENGINE_ROLES, policy):
            return True
    return False


def _api_lives(before: Sample, sample: Sample, policy: HealthPolicy) -> bool:
    return any(
        _computes(_processes(before, rank.rank), rank, frozenset({"api"}), policy)
        for rank in sample.ranks
        if rank.rank == 0
    )


def _computes(before: Sequence[ProcessView], rank: RankView, roles: frozenset[str], policy: HealthPolicy) -> bool:
    """Return whether a process of these roles uses its processor, or is runnable twice in a row without getting one."""
    wanted = {process.role for process in before if process.state in _WANTS_TO_RUN}
    return any(
        (process.share or 0.0) >= policy.life_share or (process.state in _WANTS_TO_RUN and process.role in wanted)
        for process in rank.processes
        if process.role in roles
    )


def _link_recovered(run: Sequence[Sample], policy: HealthPolicy) -> float:
    """Return from when on the engine's own connections must have recovered from a silence between members.

    TCP waits longer after each loss, so a link that was gone for a while is used again only after as long once more.
    """
    recovered = float("-inf")
    for began, ended in _silences(run):
        recovered = max(recovered, ended + (ended - began) + policy.link_recover)
    return recovered


def _silences(run: Sequence[Sample]) -> Iterator[tuple[float, float]]:
    """Yield (begin, end) of each silence of a member; one that still lasts ends with the newest sample."""
    began: float | None = None
    for sample in run:
        heard = min((rank.heard for rank in sample.ranks), default=sample.time)
        if sample.time - heard > _SAMPLE_SECONDS:
            began = heard if began is None else began
        elif began is not None:
            yield began, sample.time
            began = None
    if began is not None:
        yield began, run[-1].time


def _culprit(run: Sequence[Sample]) -> int | None:
    """Return the rank that the others wait for.

    A stopped one; else the one that has begun fewer collective operations than the others, which wait for it in one.
    """
    last = run[-1]
    for rank in last.ranks:
        if any(process.state == "T" for process in rank.processes if process.role in ENGINE_ROLES):
            return rank.rank
    counted = {rank.rank: rank.collectives for rank in last.ranks if rank.collectives is not None}
    if len(counted) == len(last.ranks) > 1 and len(set(counted.values())) > 1:
        return min(counted, key=lambda rank: counted[rank])
    if len(last.ranks) == 1:
        return last.ranks[0].rank
    return None
