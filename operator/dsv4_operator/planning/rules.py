"""Rules learned from experience in the field, as rows: each with condition, remedy and evidence.

`findings` is pure and cheap: the planner refuses by it, and `dsv4 plan` and the status show its warnings. The rows are
in `rules_engine` (image, flags, variables, formats) and `rules_machines` (topology, memory, network).
"""

from __future__ import annotations

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.planning.facts import Facts
from dsv4_operator.planning.rule import Rule, RuleFinding, Severity
from dsv4_operator.planning.rules_engine import ENGINE_RULES
from dsv4_operator.planning.rules_machines import MACHINE_RULES
from dsv4_operator.planning.setup import Setup, setup

RULES: tuple[Rule, ...] = (*MACHINE_RULES, *ENGINE_RULES)
"""All rules, those about the machines first."""


def findings(deployment: DSV4Deployment, facts: Facts, group: int = 0) -> tuple[RuleFinding, ...]:
    """Return everything that the rules say about one group of `deployment`: refusals first, then warnings.

    Raises:
        PlanRefused: the image is not known, or the model cannot be divided as asked, so that no rule can be tried.
    """
    return broken_rules(setup(deployment, facts, group))


def broken_rules(chosen: Setup) -> tuple[RuleFinding, ...]:
    """Return what `findings` does, for choices that are made already."""
    found = [finding for rule in RULES for finding in rule.findings(chosen)]
    return tuple(sorted(found, key=lambda finding: finding.severity is not Severity.REFUSE))
