"""`dsv4 plan`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4_operator.api import DSV4Deployment, Hardware, Reason
from dsv4_operator.backends.local.facts import model_here
from dsv4_operator.cli import plan_evidence, plan_text
from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input
from dsv4_operator.cli.output import DocumentFormat, fitted, note, render_document, render_table, say
from dsv4_operator.cli.source import DeploymentSource
from dsv4_operator.cli.what_if import changed
from dsv4_operator.planning import Facts, PlanRefused, plan_group
from dsv4_operator.planning.catalog import Machine, UnknownCheckpoint, machine, machine_named, model_for
from dsv4_operator.planning.catalog.checkpoint import BadCheckpoint
from dsv4_operator.planning.facts import NodeFacts
from dsv4_operator.planning.memory import FitVerdict, advice, deployment_plan
from dsv4_operator.planning.rule import Severity
from dsv4_operator.planning.rules import findings
from dsv4_operator.planning.setup import image_profile, measured_here
from dsv4_runtime.contract import GroupPlan


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The command line."""

    what: str
    """A file, or on a cluster the name of a deployment."""
    changes: Sequence[str] = ()
    machine: str | None = None
    """A machine of the catalog, in place of the usual one of the hardware."""
    form: DocumentFormat | None = None
    log: str | None = None
    """A log of vLLM's, to compare the plan with."""


def explain(term: str, form: DocumentFormat | None) -> ExitCode:
    """Print the logged starts behind a term of every plan.

    Raises:
        CommandError: there is no such term.
    """
    found = plan_evidence.explained(term)
    document = plan_evidence.explanation_document(term, found)
    say(plan_evidence.explanation(term, found) if form is None else render_document(document, form))
    return ExitCode.OK


def show(source: DeploymentSource, request: PlanOptions) -> ExitCode:
    """Do what `_show` does; with `-o` what is wrong with the input is a document too.

    Raises:
        CommandError: the file or an option is invalid.
    """
    try:
        return _show(source, request)
    except CommandError as error:
        if request.form is not None:
            say(render_document({"errors": list(error.messages)}, request.form))
        raise


def _show(source: DeploymentSource, request: PlanOptions) -> ExitCode:
    """Print the plan of the first incarnation of every group, with its memory and what would make it fit.

    Raises:
        CommandError: the file or an option is invalid.
    """
    log = plan_evidence.read_log(request.log) if request.log else None
    deployment = changed(source.given(request.what), request.changes)
    kind = _machine(deployment, request.machine)
    facts = source.facts(deployment, kind, chosen=request.machine is not None)
    kind = _as_found(kind, facts.of_group(0, deployment.spec.topology.nodes_per_group))
    try:
        model = model_here(deployment.spec.model)
        profile = image_profile(deployment)
        chosen = model or model_for(deployment.spec.model)
        facts = replace(facts, measured=source.measured(deployment.metadata.name))
        measured = measured_here(deployment, facts, chosen, kind)
        memory = deployment_plan(deployment, chosen, kind, profile, measured)
    except UnknownCheckpoint as error:
        raise bad_input(str(error)) from None
    except ValueError as error:
        raise bad_input(f"spec.topology: {error}") from None
    except BadCheckpoint as error:
        raise bad_input(f"{deployment.metadata.name}: {error}") from None
    except PlanRefused as refused:
        raise bad_input(refused.message) from None
    plans, refusal = _plans(deployment, replace(facts, model=model))
    changes = tuple(advice(memory))
    if request.form is not None:
        found: dict[str, Any] = {"name": deployment.metadata.name, "memory": plan_text.document(memory, changes)}
        if log is not None:
            found["log"] = plan_evidence.comparison_document(memory, log)
        found |= {"refused": refusal.message} if refusal else {"groups": [plan.to_dict() for plan in plans]}
        say(render_document(found, request.form))
    else:
        _print(plan_text.text(memory, changes, deployment.metadata.name, refused=refusal is not None))
        if log is not None:
            _print("\n" + "\n\n".join(plan_evidence.compared(memory, log)))
        elif memory.verdict is not FitVerdict.NO and not refusal:
            _print("\n" + "\n\n".join(_next(plans, here=not kind.sm, placed=facts.placed is not None)))
    for warning in _warnings(deployment, facts):
        note(f"warning: {warning}")
    # Too little memory is what the text above is about.
    if refusal and (memory.verdict is not FitVerdict.NO or refusal.reason is not Reason.MEMORY_SHORT):
        note(f"error: {deployment.metadata.name}: {refusal.message}")
    return ExitCode.BAD_INPUT if refusal or memory.verdict is FitVerdict.NO else ExitCode.OK


def _machine(deployment: DSV4Deployment, name: str | None) -> Machine:
    hardware = deployment.spec.topology.hardware
    if name is None:
        return machine(hardware)
    try:
        found = machine_named(name)
    except KeyError as error:
        raise bad_input(f"--machine: {error.args[0]}") from None
    if found.hardware not in (hardware, "") or (not found.hardware and hardware is Hardware.CPU):
        raise bad_input(f"--machine {name} is {found.hardware}, and spec.topology.hardware is {hardware}; change one")
    return found


def _as_found(kind: Machine, nodes: Sequence[NodeFacts]) -> Machine:
    """Return `kind` as it is among `nodes`, the first group's: the variant with the least memory."""
    if not kind.sm:
        return replace(kind, memory_bytes=min((node.memory_bytes for node in nodes), default=0))
    found = [machine_named(node.machine) for node in nodes if node.machine]
    return min((one for one in found if one.hardware == kind.hardware), key=lambda one: one.memory_bytes, default=kind)


def _plans(deployment: DSV4Deployment, facts: Facts) -> tuple[list[GroupPlan], PlanRefused | None]:
    """Return the plan of each group, or why there is none."""
    try:
        groups = range(max(deployment.spec.replicas, 1))
        return [plan_group(deployment, facts, group=group, incarnation=1) for group in groups], None
    except PlanRefused as refused:
        return [], refused


def _warnings(deployment: DSV4Deployment, facts: Facts) -> list[str]:
    """Return what the rules say short of a refusal."""
    try:
        found = findings(deployment, facts)
    except PlanRefused:
        return []
    return [finding.message for finding in found if finding.severity is Severity.WARN]


def _next(plans: Sequence[GroupPlan], *, here: bool, placed: bool) -> Iterator[str]:
    """Yield what is beyond the memory. Members that are `here` have addresses already, those `placed` have nodes."""
    known = here or placed
    if known:
        yield _members(plans, placed=placed)
    elif len(plans) > 1:
        machines = sum(len(plan.members) for plan in plans)
        yield f"This is one of {len(plans)} equal groups on {machines} machines together."
    placeholders = "" if known else ", with 192.0.2.x for addresses that only the machines know"
    yield f"The command lines and the environment of every member: -o yaml{placeholders}."


def _members(plans: Sequence[GroupPlan], *, placed: bool) -> str:
    rows = [
        [
            str(plan.group),
            str(member.rank),
            str(member.role),
            (member.node or "") if placed else member.address,
            str(member.devices),
        ]
        for plan in plans
        for member in plan.members
    ]
    return render_table(["GROUP", "RANK", "ROLE", "NODE" if placed else "ADDRESS", "DEVICES"], rows)


def _print(text: str) -> None:
    if not sys.stdout.isatty():
        say(text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    shown = Text(fitted(text, console.width), no_wrap=True)
    styles = {"█": "cyan", "▓": "blue", "▒": "green", "░": "yellow", "·": "dim"}
    for fill, style in styles.items():
        shown.highlight_regex(f"{fill}+", style)
    shown.highlight_regex(r"(?m)^It fits;", "bold green")
    shown.highlight_regex(r"(?m)^It fits by less", "bold yellow")
    shown.highlight_regex(r"(?m)^It does not fit:", "bold red")
    console.print(shown)
