"""Text and documents for deployments, their groups, members and failures. Pure: no terminal, no clock."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsv4_operator.api import (
    ConditionStatus,
    ConditionType,
    DeploymentStatus,
    DSV4Deployment,
    FailureStatus,
    GroupPhase,
    GroupStatus,
    Hardware,
    MemberStatus,
    Reason,
)
from dsv4_operator.api.values import format_duration
from dsv4_operator.backends.local.state import NETWORK_ANNOTATION
from dsv4_operator.cli.output import (
    format_age,
    format_seconds,
    local_datetime,
    local_time,
    one_line,
    plural,
    render_table,
)
from dsv4_operator.cli.sources.base import LOOP_SILENCE_SECONDS, DeploymentView
from dsv4_operator.lifecycle.status import undetermined, warnings
from dsv4_runtime.contract import Health, KernelStatus, Phase, permit
from dsv4_runtime.contract.gateway import FatalKind, FatalRequests
from dsv4_runtime.contract.kernels import STOCK

_REPAIRS = {1: "the engine is restarted in place", 2: "the group is formed again", 3: "given up"}
_HEALTH = {
    GroupPhase.SERVING: Health.HEALTHY,
    GroupPhase.RESTARTING: Health.DEAD,
    GroupPhase.RECOVERING: Health.DEAD,
    GroupPhase.FAILED: Health.DEAD,
    GroupPhase.FORMING: Health.STARTING,
    GroupPhase.QUEUED: Health.STARTING,
    GroupPhase.STARTING: Health.STARTING,
}


def deployments_table(items: Sequence[DeploymentView], now: float, *, wide: bool, namespaces: bool = False) -> str:
    """Return one row per deployment, optionally with its namespace as the first column."""
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
        format_age(now - item.created) if item.created else "",
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
    """Return one deployment: its row, the reason if it is not ready, its members, KV caches and kernels."""
    parts = [deployments_table([item], now, wide=wide), operator_lag(item), loop_text(item, now)]
    if item.running:
        parts.append(not_ready_reason(item.object))
        parts.append(storage_problem(item.status))
        parts.append(members_table(item.status, now))
        parts.append("\n".join(_warnings(item.status)))
        parts.append("\n".join(_kv_caches(item.status)))
        parts.append("\n".join(_kernels(item.status)))
    return "\n\n".join(filter(None, parts))


def members_table(status: DeploymentStatus, now: float) -> str:
    """Return one row per member; empty if there are none."""
    many = len(status.groups) > 1
    rows = [
        [str(group.index)] * many
        + [
            str(member.rank),
            str(member.role),
            member.address,
            str(member.phase or ""),
            _member_message(member, now),
        ]
        for group in status.groups
        for member in group.members
    ]
    return render_table(["GROUP"] * many + ["RANK", "ROLE", "ADDRESS", "PHASE", "MESSAGE"], rows) if rows else ""


def _fatal_kind(kind: FatalKind) -> str:
    left = format_seconds(kind.seconds)
    return (
        f"requests with {' and '.join(kind.kinds)} are refused for another {left}: {kind.engines} engines died of them"
    )


def _warnings(status: DeploymentStatus) -> Iterator[str]:
    for group in status.groups:
        for member in group.members:
            yield from (f"Warning: {one_line(text)}" for text in warnings(member))


def _member_message(member: MemberStatus, now: float) -> str:
    silence = ""
    if member.silent_since:
        seconds = format_seconds(max(now - member.silent_since, 0))
        silence = f"no answer for {seconds}" if member.phase else f"started; no answer yet after {seconds}"
    return "; ".join(filter(None, [one_line(member.message), silence]))


_RECENT_SECONDS = 600.0


def loop_text(item: DeploymentView, now: float) -> str:
    """Return the age of the status of `dsv4 up`, and the latest restart of its loop; empty for a cluster."""
    loop = item.loop
    if loop is None:
        return item.lost
    restart = ""
    if loop.restarts and now - loop.restarts[-1][0] < _RECENT_SECONDS:
        time, reason = loop.restarts[-1]
        restart = f"; the loop {reason} {format_seconds(max(now - time, 0))} ago"
        restart += " and was restarted" if loop.loop is not None else "; it is being restarted"
    if loop.beat is None:
        return f"The loop has not reported yet{restart}"
    age = max(now - loop.beat, 0)
    if age < LOOP_SILENCE_SECONDS:
        return f"Reported {format_seconds(age)} ago{restart}"
    process = f" (process {loop.loop})" if loop.loop is not None else ""
    source = "the members were queried directly" if item.queried else "no member answers directly"
    return f"The loop{process} has not responded for {format_seconds(age)}{restart}; {source}"


def storage_problem(status: DeploymentStatus) -> str:
    """Return the reason why the status cannot be saved; empty if it can."""
    progressing = status.condition(ConditionType.PROGRESSING)
    if progressing is None or progressing.reason is not Reason.STATE_NOT_SAVED:
        return ""
    return f"{progressing.reason}: {one_line(progressing.message)}"


def operator_lag(item: DeploymentView) -> str:
    """Return a message if the operator has not processed the object's latest generation, else an empty text."""
    observed, latest = item.status.observed_generation, item.object.metadata.generation
    if item.stored is None or observed >= latest:
        return ""
    lag = (
        f"The operator has processed generation {observed} of {latest}"
        if observed
        else "No operator has processed it yet"
    )
    return f"{lag}; does dsv4-operator run in this cluster?"


def group_label(status: DeploymentStatus, group: GroupStatus) -> str:
    """Return the prefix of lines about a group; empty if the deployment has a single group."""
    return f"group {group.index}: " if len(status.groups) > 1 else ""


def _kv_caches(status: DeploymentStatus) -> list[str]:
    """Return the size of each group's KV cache and its difference from the memory plan."""
    lines = []
    for group in status.groups:
        if (found := group.kv_cache) is None:
            continue
        planned = found.planned_tokens
        compared = f" (planned {planned:,}, {100 * (found.tokens / planned - 1):+.1f} %)" if planned else ""
        concurrency = f"{found.concurrency:.2f} concurrent requests of the maximum length"
        lines.append(f"{group_label(status, group)}KV cache {found.tokens:,} tokens{compared}, {concurrency}")
    return lines


def _kernels(status: DeploymentStatus) -> list[str]:
    """Return the operations of each group by provider, bundled kernels or vLLM."""
    lines = []
    for group in status.groups:
        if not group.kernels:
            continue
        bundled = [found.op for found in group.kernels if found.provider != STOCK]
        stock = [found.op for found in group.kernels if found.provider == STOCK]
        providers = [f"{name} {', '.join(ops)}" for name, ops in (("bundled", bundled), ("vLLM's", stock)) if ops]
        lines.append(f"{group_label(status, group)}kernels: {'; '.join(providers)}")
    return lines


def not_ready_reason(found: DSV4Deployment) -> str:
    """Return on one line why a deployment is not ready or not as specified; empty if it is, or if unknown."""
    given_up = (ConditionType.RECOVERY_EXHAUSTED, ConditionType.ROLLED_BACK)
    for kind in (*given_up, ConditionType.ACCEPTED, ConditionType.READY):
        condition = found.status.condition(kind)
        bad = ConditionStatus.TRUE if kind in given_up else ConditionStatus.FALSE
        if condition and condition.status is bad and condition.message:
            return f"{condition.reason}: {one_line(condition.message)}"
    return ""


def ready_text(found: DSV4Deployment, seconds: float, token_file: str, options: str) -> str:
    """Return the summary of a start that took `seconds`: addresses, and commands to try with `options`."""
    status, name = found.status, found.metadata.name
    if not status.endpoint:
        return f"{name} is {str(status.phase).lower()}; the file requests no running group."
    body = {
        "model": found.served_names[0],
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": 24,
    }
    lines = [
        f"{name} is serving after {format_seconds(seconds)}.",
        "",
        f"endpoint    {status.endpoint}",
    ]
    if network := found.metadata.annotations.get(NETWORK_ANNOTATION):
        lines.append(f"network     {network}")
    if status.ray_dashboard:
        lines.append(f"dashboard   {status.ray_dashboard}  (token: {token_file})")
    headers = "-H 'Content-Type: application/json'"
    if found.spec.gateway.api_keys is not None:
        # Not the key: output may be kept in logs.
        lines.append("key         `dsv4 connect FILE` shows it")
        headers += " -H 'Authorization: Bearer KEY'"
    return "\n".join(
        [
            *lines,
            f"chat        dsv4 chat {name}{options}",
            "",
            f"curl -sS {status.endpoint}/chat/completions {headers} \\",
            f"  -d {shlex.quote(json.dumps(body))}",
        ]
    )


def failure_text(failure: FailureStatus) -> str:
    """Return `EngineCoreDied on rank 0 (10.0.0.2): its first fatal line`, as far as known."""
    culprit = ""
    if failure.culprit_rank is not None:
        node = f" ({failure.culprit_node})" if failure.culprit_node else ""
        culprit = f" on rank {failure.culprit_rank}{node}"
    message = f": {one_line(failure.message)}" if failure.message else ""
    return f"{failure.cause}{culprit}{message}"


def _verdict(item: DeploymentView, group: GroupStatus | None) -> str:
    """Return the health of a group, or the phase of the deployment."""
    if not item.running or group is None:
        return item.phase
    return str(_HEALTH.get(group.phase, group.phase))


def _group_of_latest_failure(item: DeploymentView) -> GroupStatus | None:
    """Return the group that failed last, else the first group."""
    groups = item.status.groups
    failed = [group for group in groups if group.last_failure]
    return max(failed, key=lambda group: group.last_failure.time if group.last_failure else 0.0, default=None) or (
        groups[0] if groups else None
    )


_NONE_FATAL = FatalRequests()


def why_document(item: DeploymentView, now: float, fatal: FatalRequests = _NONE_FATAL) -> dict[str, Any]:
    """Return the latest failure and its repair as a document; `fatal` is what the gateway refuses."""
    group = _group_of_latest_failure(item)
    document: dict[str, Any] = {"name": item.name, "phase": item.phase, "verdict": _verdict(item, group)}
    if loop := loop_text(item, now):
        document["loop"] = loop
    if fatal.requests:
        document["fatalRequests"] = [request.to_dict() for request in fatal.requests]
    if fatal.kinds:
        document["fatalKinds"] = [kind.to_dict() for kind in fatal.kinds]
    if group is None:
        return document
    if progress := _start_progress(item, group):
        document["starting"] = progress
    if item.running and (sign := undetermined(group)) is not None:
        document["undetermined"] = sign
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


def why_text(item: DeploymentView, now: float, fatal: FatalRequests = _NONE_FATAL) -> str:
    """Return the latest failure and its repair as text of at most 12 lines; arguments as of `why_document`."""
    group = _group_of_latest_failure(item)
    label = f" group {group.index}" if group and len(item.status.groups) > 1 else ""
    since = ""
    if item.running and group and group.phase is GroupPhase.SERVING and group.ready_time:
        since = f" since {local_datetime(group.ready_time)}"
    rows = [("verdict", f"{_verdict(item, group)}{since}"), ("operator", operator_lag(item))]
    rows.append(("loop", loop_text(item, now)))
    failure = group.last_failure if group else None
    reason = not_ready_reason(item.object) if item.running else ""
    # Omitted if the condition only repeats the cause below.
    if not (failure and failure.message and one_line(failure.message) in reason):
        rows.append(("reason", reason))
    if group is not None:
        rows.append(("starting", _start_progress(item, group)))
    sign = undetermined(group) if item.running and group is not None else None
    if sign is not None and group is not None:
        rows.append(("cause", f"not determined yet{f'; first sign: {one_line(sign)}' if sign else ''}"))
        rows.append(("earlier", _history(group.history)))
    elif group is None or failure is None:
        rows.append(("cause", "nothing has died"))
    else:
        rows += _failure_rows(failure)
        rows.append(("earlier", _history([each for each in group.history if each.time != failure.time])))
    if group is not None:
        pending = "; the restart for this death is not counted yet" if sign is not None else ""
        rows.append(("budget", _budget(item, group, now) + pending))
    if requests := fatal.requests:
        last, more = requests[-1], f" and {len(requests) - 1} more" if len(requests) > 1 else ""
        text = f"{last.id} ({last.size:,} bytes){more}: {last.engines} engines died of it, refused since"
        rows.append(("request", text))
    if fatal.kinds:
        rows.append(("kinds", "; ".join(map(_fatal_kind, fatal.kinds))))
    rows = [(key, text) for key, text in rows if text]
    width = max(len(key) for key, _ in rows)
    return "\n".join([f"{item.name}{label} ({item.phase})", *[f"  {key.ljust(width)}   {text}" for key, text in rows]])


def start_document(item: DeploymentView) -> dict[str, Any]:
    """Return the steps of the latest start of each group that has served, as a document."""
    return {
        "name": item.name,
        "phase": item.phase,
        "groups": [
            {
                "group": group.index,
                "incarnation": group.incarnation,
                "engineGeneration": group.engine_generation,
                "seconds": round(sum(step.seconds for step in group.start), 3),
                "steps": [step.to_dict() for step in group.start],
            }
            for group in item.status.groups
            if group.start
        ],
    }


def start_text(item: DeploymentView) -> str:
    """Return the steps of the latest start of each group that has served, as one table per group."""
    parts = []
    for group in item.status.groups:
        total = sum(step.seconds for step in group.start)
        if not group.start:
            continue
        label = f" group {group.index}" if len(item.status.groups) > 1 else ""
        engine = f"incarnation {group.incarnation}, engine generation {group.engine_generation}"
        rows = [
            [str(step.phase), step.step, f"{step.seconds:.1f}", f"{100 * step.seconds / total if total else 0:.0f} %"]
            for step in group.start
        ]
        table = render_table(["PHASE", "STEP", "SECONDS", "SHARE"], rows)
        parts.append(f"{item.name}{label}: started in {format_seconds(total)}, {engine}\n{table}")
    return "\n\n".join(parts) or f"{item.name}: no group has served yet"


def log_cause_text(document: Mapping[str, Any]) -> str:
    """Return the cause that a log proves as text: cause, message, evidence with file and line, remedy, page."""
    restarts = "a restart does not help" if document["deterministic"] else ""
    rows = [
        ("cause", f"{document['cause']}{f' ({restarts})' if restarts else ''}"),
        ("message", one_line(document["message"])),
        *[
            ("evidence" if not at else "", f"{one['line']}: {one_line(one['text'])}")
            for at, one in enumerate(document["evidence"])
        ],
        ("remedy", document["remedy"]),
        ("page", document["page"]),
    ]
    return "\n".join(f"{key.ljust(8)}   {text}" for key, text in rows if text)


def _start_progress(item: DeploymentView, group: GroupStatus) -> str:
    """Return the progress of the group's start, reported by the first member that has any; empty if none does."""
    if not item.running or group.phase not in (GroupPhase.STARTING, GroupPhase.RESTARTING):
        return ""
    busy = (member for member in group.members if member.phase and member.phase is not Phase.SERVING and member.message)
    return next((f"rank {m.rank} {m.phase}: {one_line(m.message)}" for m in busy), "")


def _failure_rows(failure: FailureStatus) -> list[tuple[str, str]]:
    """Return the course of a failure, in the order of its events."""
    detector = f", by {failure.detected_by}" if failure.detected_by else ""
    repair = f"level {failure.level}, {_REPAIRS.get(failure.level, '')}" if failure.level else "not decided yet"
    if failure.recover_seconds is not None:
        serving = f"again after {format_seconds(failure.recover_seconds)}"
    else:
        serving = "" if failure.level == 3 else "not again yet"
    return [
        ("detected", f"{local_datetime(failure.time)}{detector}"),
        ("cause", failure_text(failure)),
        ("evidence", failure.evidence or ""),
        ("repair", repair),
        ("serving", serving),
    ]


def _history(earlier: Sequence[FailureStatus]) -> str:
    latest = [f"{failure.cause} {local_time(failure.time)}" for failure in reversed(earlier)]
    more = f" and {len(latest) - 3} more" if len(latest) > 3 else ""
    return ", ".join(latest[:3]) + more


def _budget(item: DeploymentView, group: GroupStatus, now: float) -> str:
    policy = item.object.spec.recovery.policy()
    spent = permit(policy, group.restarts, now).spent
    left = max(policy.max_restarts - spent, 0)
    window = format_duration(policy.window_seconds)
    text = f"{left} of {plural(policy.max_restarts, 'restart')} left within {window}"
    if item.running and group.next_restart_time and group.next_restart_time > now:
        text += f"; the next one at {local_time(group.next_restart_time)}"
    return text


def kernels_document(item: DeploymentView) -> dict[str, Any]:
    """Return the kernel providers of each group as a document."""
    return {
        "name": item.name,
        "phase": item.phase,
        "kernels": item.object.spec.engine.kernels or "default",
        "groups": [
            {
                "group": group.index,
                "engineGeneration": group.engine_generation,
                "operations": [_operation(found) for found in group.kernels],
            }
            for group in item.status.groups
        ],
    }


def _operation(found: KernelStatus) -> dict[str, object]:
    document: dict[str, object] = found.to_dict()
    if compared := found.against_next():
        document["next"] = {"provider": compared[0], "speedup": round(compared[1], 3)}
    return document


def kernels_text(item: DeploymentView) -> str:
    """Return the kernel providers of each group as tables: chosen, with their speed, and excluded, with the reason.

    The speed of a provider is relative to the fastest correct alternative.
    """
    setting = item.object.spec.engine.kernels or "default"
    head = f"{item.name} ({item.phase}), spec.engine.kernels: {setting}"
    groups = [group for group in item.status.groups if group.kernels]
    if not groups:
        return f"{head}\n\n{_no_kernels(item, setting)}"
    index = ["GROUP"] * (len(groups) > 1)
    chosen, excluded = [], []
    for group in groups:
        for found in group.kernels:
            row = [str(group.index)] * len(index) + [found.op]
            compared = found.against_next()
            speed = f"{compared[1]:.2f} x {compared[0]}" if compared else ""
            chosen.append([*row, found.provider, speed, "; ".join(filter(None, (found.note, _on_request(found))))])
            excluded += [[*row, each.provider, each.excluded] for each in found.standings if each.excluded is not None]
    tables = [render_table([*index, "OPERATION", "PROVIDER", "SPEED", "NOTE"], chosen)]
    if excluded:
        tables.append(render_table([*index, "OPERATION", "EXCLUDED", "SEEN"], excluded))
    return "\n\n".join([head, *tables])


def _on_request(found: KernelStatus) -> str:
    """Return the setting that selects a faster kernel which vLLM uses on request only; empty if there is none."""
    faster = found.faster_on_request()
    return f"kernels: {found.op}={faster[0]} is {faster[1]:.2f} x as fast" if faster else ""


def _no_kernels(item: DeploymentView, setting: str) -> str:
    hardware = item.object.spec.topology.hardware
    if hardware is Hardware.CPU:
        return "vLLM's CPU kernels compute every operation; others need a GPU."
    if setting == "off" or (setting == "default" and hardware in (Hardware.H100, Hardware.H200)):
        return "vLLM's own kernels compute every operation; kernels: auto picks the fastest right ones."
    return "No engine has reported its kernel providers yet; it reports them when it creates its first layer."
