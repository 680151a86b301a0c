"""`dsv4 plan`."""

from __future__ import annotations

from pathlib import Path

from dsv4_operator.backends.local.facts import local_facts
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli.errors import ExitCode, bad_input
from dsv4_operator.cli.output import DocumentFormat, render_document, say
from dsv4_operator.cli.up import read_file
from dsv4_operator.planning import PlanRefused, plan_group


def show(file: str, root: Path, form: DocumentFormat) -> ExitCode:
    """Print the plan of the first incarnation: one document, or a list of them when the file asks for several groups.

    Raises:
        CommandError: the file is invalid, or the planner refuses it.
    """
    deployment = read_file(file)
    # As on a machine where members get networks of their own; `up` finds out whether that is so here.
    facts = local_facts(deployment, DeploymentState(root, deployment.metadata.name), isolated=True)
    try:
        plans = [
            plan_group(deployment, facts, group=group, incarnation=1).to_dict()
            for group in range(max(deployment.spec.replicas, 1))
        ]
    except PlanRefused as refused:
        raise bad_input(f"{deployment.metadata.name}: {refused.message}") from None
    say(render_document(plans[0] if len(plans) == 1 else plans, form))
    return ExitCode.OK
