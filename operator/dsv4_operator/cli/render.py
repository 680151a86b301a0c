"""Deployments as text for people: pure, no terminal, no clock."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsv4_operator.api import (
    ConditionStatus,
    ConditionType,
    DeploymentStatus,
    DSV4Deployment,
    FailureStatus,
    GroupPhase,
    GroupStatus,
)
from dsv4_operator.api.values import format_duration
from dsv4_operator.backends.local.state import NETWORK_ANNOTATION
from dsv4_operator.cli import words
from dsv4_operator.cli.look import DeploymentView
from dsv4_operator.cli.output import render_table
from dsv4_operator.cli.progress import members_table
from dsv4_runtime.contract import Health, Phase, permit
from dsv4_runtime.contract.gateway import FatalRequest
from dsv4_runtime.contract.kernels import STOCK


def list_document(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return several objects, as kubectl prints them."""
    return {"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": list(items)}


def deployments_table(items: Sequence[DeploymentView], now: float, *, wide: bool, namespaces: bool = False) -> str:
    """Return one row a deployment; with `namespaces` it begins with its own."""
    headers = ["NAME", "READY", "PHASE", "MODEL", "RESTARTS", "AGE", "ENDPOINT"]
    if wide:
        headers += ["HARDWARE", "NODES", "INCARNATION", "CAUSE", "DASHBOARD"]
    rows = [_row(item, now, wide=wide) for item in items]
    if namespaces:
        headers = ["NAMESPACE", *headers]
        rows = [[item.object.metadata.namespace, *row] for item, row in zip(items, rows, strict=True)]
    return render_table(headers, rows)


def _row(item: DeploymentView, now: float, *, wide: bool) -> list[str]:
    spec, status = item.object.spec, item.status
    row = [
        item.name,
        f"{status.ready_replicas}/{spec.replicas}",
        item.phase,
        str(spec.model.variant),
        str(sum(group.total_restarts for group in status.groups)),
        words.age(now - item.created) if item.created else "",
        status.endpoint or "",
    ]
    if not wide:
        return row
    failures = [str(group.last_failure.cause) for group in status.groups if group.last_failure]
    return [
        *row,
        str(spec.topology.hardware),
        str(spec.topology.nodes_per_group * spec.replicas),
        ",".join(str(group.incarnation) for group in status.groups),
        ",".join(dict.fromkeys(failures)),
        status.ray_dashboard or "",
    ]


def deployment_text(item: DeploymentView, now: float, *, wide: bool) -> str:
    """Return one deployment: its row, why it is not ready, its members."""
    parts = [deployments_table([item], now, wide=wide)]
    if behind := unseen(item):
        parts.append(behind)
    if item.running and (reason := not_ready(item.object)):
        parts.append(reason)
    if item.running and (table := members_table(item.status, now)):
        parts.append(table)
    if item.running and (lines := kv_caches(item.status)):
        parts.append("\n".join(lines))
    if item.running and (lines := kernels(item.status)):
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def unseen(item: DeploymentView) -> str:
    """Say that the operator of a cluster has not looked at the object as it is now; empty if it has."""
    seen, latest = item.status.observed_generation, item.object.metadata.generation
    if item.kept is None or seen >= latest:
        return ""
    looked = f"The operator has seen generation {seen} of {latest}" if seen else "No operator has looked at it yet"
    return f"{looked}; does dsv4-operator run in this cluster?"


def kv_caches(status: DeploymentStatus) -> list[str]:
    """Say how large the KV cache of every group is, and how far that is from the memory plan."""
    lines = []
    for group in status.groups:
        if (found := group.kv_cache) is None:
            continue
        planned = found.planned_tokens
        compared = f" (planned {planned:,}, {100 * (found.tokens / planned - 1):+.1f} %)" if planned else ""
        label = f"group {group.index}: " if len(status.groups) > 1 else ""
        room = f"{found.concurrency:.2f} requests of the greatest length at once"
        lines.append(f"{label}KV cache {found.tokens:,} tokens{compared}, {room}")
    return lines


def kernels(status: DeploymentStatus) -> list[str]:
    """Say which operations of every group the bundled kernels compute; nothing where none was asked for."""
    lines = []
    for group in status.groups:
        if not group.kernels:
            continue
        bundled = [found.op for found in group.kernels if found.provider != STOCK]
        stock = [found.op for found in group.kernels if found.provider == STOCK]
        sides = [(bundled, "bundled"), (stock, "vLLM's")]
        label = f"group {group.index}: " if len(status.groups) > 1 else ""
        told = [f"{whose} {', '.join(ops)}" for ops, whose in sides if ops]
        lines.append(f"{label}kernels: {'; '.join(told)}")
    return lines


def not_ready(found: DSV4Deployment) -> str:
    """Return why a deployment is not ready, or not as it is asked for, on one line; empty if it is, or nobody said."""
    given_up = (ConditionType.RECOVERY_EXHAUSTED, ConditionType.ROLLED_BACK)
    for kind in (*given_up, ConditionType.ACCEPTED, ConditionType.READY):
        condition = found.status.condition(kind)
        bad = ConditionStatus.TRUE if kind in given_up else ConditionStatus.FALSE
        if condition and condition.status is bad and condition.message:
            return f"{condition.reason}: {words.one_line(condition.message)}"
    return ""


@dataclass(frozen=True, slots=True)
class Hints:
    """Facts that the set-up's last lines need besides the object."""

    token_file: str
    options: str
    """Options that every later command needs, such as ` --state-dir DIR`."""


def ready_text(found: DSV4Deployment, took: float, hints: Hints) -> str:
    """Return the end of a successful start: where it is, and what to paste."""
    status, name = found.status, found.metadata.name
    if not status.endpoint:
        return f"{name} is {str(status.phase).lower()}; the file asks for no running group."
    body = {
        "model": found.served_names[0],
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": 24,
    }
    lines = [
        f"{name} is serving after {words.seconds(took)}.",
        "",
        f"endpoint    {status.endpoint}",
    ]
    if network := found.metadata.annotations.get(NETWORK_ANNOTATION):
        lines.append(f"network     {network}")
    if status.ray_dashboard:
        lines.append(f"dashboard   {status.ray_dashboard}  (token: {hints.token_file})")
    return "\n".join(
        [
            *lines,
            f"chat        dsv4 chat {name}{hints.options}",
            "",
            f"curl -sS {status.endpoint}/chat/completions -H 'Content-Type: application/json' \\",
            f"  -d {shlex.quote(json.dumps(body))}",
        ]
    )


def verdict(item: DeploymentView, group: GroupStatus | None) -> str:
    """Return the verdict's first word about a group, or `Stopped`."""
    if not item.running or group is None:
        return item.phase
    match group.phase:
        case GroupPhase.SERVING:
            return Health.HEALTHY
        case GroupPhase.RESTARTING | GroupPhase.RECOVERING | GroupPhase.FAILED:
            return Health.DEAD
        case GroupPhase.FORMING | GroupPhase.STARTING:
            return Health.STARTING
        case _:
            return str(group.phase)


def telling_group(item: DeploymentView) -> GroupStatus | None:
    """Return the group that `dsv4 why` is about: the one that died last, else the first."""
    groups = item.status.groups
    failed = [group for group in groups if group.last_failure]
    return max(failed, key=lambda group: group.last_failure.time if group.last_failure else 0.0, default=None) or (
        groups[0] if groups else None
    )


def why_document(item: DeploymentView, now: float, fatal: Sequence[FatalRequest] = ()) -> dict[str, Any]:
    """Return the last death and what became of it, for programs."""
    group = telling_group(item)
    document: dict[str, Any] = {"name": item.name, "phase": item.phase, "verdict": str(verdict(item, group))}
    if fatal:
        document["fatalRequests"] = [request.to_dict() for request in fatal]
    if group is None:
        return document
    if starting := _starting(item, group):
        document["starting"] = starting
    document |= {"group": group.index, "incarnation": group.incarnation, "engineGeneration": group.engine_generation}
    policy = item.object.spec.recovery.policy()
    spent = permit(policy, group.restarts, now).spent
    document["restarts"] = {
        "total": group.total_restarts,
        "spent": spent,
        "left": max(policy.max_restarts - spent, 0),
        "max": policy.max_restarts,
        "windowSeconds": policy.window_seconds,
    }
    if group.last_failure:
        document["lastFailure"] = group.last_failure.to_dict()
    document["history"] = [failure.to_dict() for failure in group.history]
    return document


def why_text(item: DeploymentView, now: float, fatal: Sequence[FatalRequest] = ()) -> str:
    """Return the same for people, in at most 12 lines."""
    group = telling_group(item)
    label = f" group {group.index}" if group and len(item.status.groups) > 1 else ""
    rows = [("verdict", f"{verdict(item, group)}{_since(item, group)}")]
    failure = group.last_failure if group else None
    if behind := unseen(item):
        rows.append(("operator", behind))
    reason = not_ready(item.object) if item.running else ""
    # The condition often says no more than the cause below.
    if reason and not (failure and failure.message and words.one_line(failure.message) in reason):
        rows.append(("reason", reason))
    if group is not None and (starting := _starting(item, group)):
        rows.append(("starting", starting))
    if group is None or failure is None:
        rows.append(("cause", "nothing has died"))
    else:
        rows += _failure_rows(failure)
        earlier = [each for each in group.history if each.time != failure.time]
        if failure.evidence:
            rows.append(("evidence", failure.evidence))
        if earlier:
            rows.append(("earlier", _history(earlier)))
    if group is not None:
        rows.append(("budget", _budget(item, group, now)))
    if fatal:
        last, more = fatal[-1], f" and {len(fatal) - 1} more" if len(fatal) > 1 else ""
        text = f"{last.id} ({last.size:,} bytes){more}: {last.engines} engines died of it, refused since"
        rows.append(("request", text))
    width = max(len(key) for key, _ in rows)
    return "\n".join([f"{item.name}{label} ({item.phase})", *[f"  {key.ljust(width)}   {text}" for key, text in rows]])


def _since(item: DeploymentView, group: GroupStatus | None) -> str:
    if item.running and group and group.phase is GroupPhase.SERVING and group.ready_time:
        return f" since {words.date(group.ready_time)}"
    return ""


def _starting(item: DeploymentView, group: GroupStatus) -> str:
    """Say how far the start of `group` is, by the first of its members that says so; empty if none does."""
    if not item.running or group.phase not in (GroupPhase.STARTING, GroupPhase.RESTARTING):
        return ""
    busy = (member for member in group.members if member.phase and member.phase is not Phase.SERVING and member.message)
    return next((f"rank {m.rank} {m.phase}: {words.one_line(m.message)}" for m in busy), "")


def _failure_rows(failure: FailureStatus) -> list[tuple[str, str]]:
    how = f", seen by {failure.detected_by}" if failure.detected_by else ""
    repair = f"level {failure.level}, {words.LEVELS.get(failure.level, '')}" if failure.level else "not decided yet"
    if failure.recover_seconds is not None:
        repair += f"; serving again after {words.seconds(failure.recover_seconds)}"
    elif failure.level != 3:
        repair += "; not serving again yet"
    return [("cause", words.cause(failure)), ("when", f"{words.date(failure.time)}{how}"), ("repair", repair)]


def _history(earlier: Sequence[FailureStatus]) -> str:
    latest = [f"{failure.cause} {words.clock(failure.time)}" for failure in reversed(earlier)]
    more = f" and {len(latest) - 3} more" if len(latest) > 3 else ""
    return ", ".join(latest[:3]) + more


def _budget(item: DeploymentView, group: GroupStatus, now: float) -> str:
    policy = item.object.spec.recovery.policy()
    spent = permit(policy, group.restarts, now).spent
    left = max(policy.max_restarts - spent, 0)
    window = format_duration(policy.window_seconds)
    text = f"{left} of {words.plural(policy.max_restarts, 'restart')} left within {window}"
    if item.running and group.next_restart_time and group.next_restart_time > now:
        text += f"; the next one at {words.clock(group.next_restart_time)}"
    return text
