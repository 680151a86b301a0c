"""`dsv4 kernels`."""

from __future__ import annotations

from typing import Any

from dsv4_operator.api import GroupStatus
from dsv4_operator.cli.errors import ExitCode
from dsv4_operator.cli.look import DeploymentView
from dsv4_operator.cli.output import DocumentFormat, render_document, render_table, say
from dsv4_operator.cli.source import DeploymentSource
from dsv4_runtime.contract import KernelStatus


def show(source: DeploymentSource, name: str | None, form: DocumentFormat | None) -> ExitCode:
    """Print who computes the operations of a layer in each group's engine, and how the others stand."""
    item = source.one(name)
    say(text(item) if form is None else render_document(document(item), form))
    return ExitCode.OK


def document(item: DeploymentView) -> dict[str, Any]:
    """Return what is printed, for programs."""
    return {
        "name": item.name,
        "phase": item.phase,
        "kernels": item.object.spec.engine.kernels,
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
    described: dict[str, object] = found.to_dict()
    if compared := found.against_next():
        described["next"] = {"provider": compared[0], "speedup": round(compared[1], 3)}
    return described


def text(item: DeploymentView) -> str:
    """Return the same for people."""
    asked = item.object.spec.engine.kernels
    head = f"{item.name} ({item.phase}), spec.engine.kernels: {asked}"
    groups = [group for group in item.status.groups if group.kernels]
    if not groups:
        return f"{head}\n\n{_nothing(item, asked)}"
    tables = [_chosen(groups), _excluded(groups)]
    return "\n\n".join([head, *filter(None, tables)])


def _nothing(item: DeploymentView, asked: str) -> str:
    if asked == "off":
        return "vLLM's own kernels compute every operation; kernels: auto picks the fastest right ones."
    if str(item.object.spec.topology.hardware) == "CPU":
        return "vLLM's CPU kernels compute every operation; others need a GPU."
    return "No engine has said yet who computes what; it does when it makes its first layer."


def _chosen(groups: list[GroupStatus]) -> str:
    """Return one row an operation; speed is against the fastest right provider of the other side."""
    many = len(groups) > 1
    rows = []
    for group in groups:
        for found in group.kernels:
            compared = found.against_next()
            speed = f"{compared[1]:.2f} x {compared[0]}" if compared else ""
            rows.append([str(group.index)] * many + [found.op, found.provider, speed, found.note or ""])
    return render_table(["GROUP"] * many + ["OPERATION", "PROVIDER", "SPEED", "NOTE"], rows)


def _excluded(groups: list[GroupStatus]) -> str:
    many = len(groups) > 1
    rows = [
        [str(group.index)] * many + [found.op, standing.provider, standing.excluded]
        for group in groups
        for found in group.kernels
        for standing in found.standings
        if standing.excluded is not None
    ]
    return render_table(["GROUP"] * many + ["OPERATION", "EXCLUDED", "SEEN"], rows) if rows else ""
