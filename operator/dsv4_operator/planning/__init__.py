"""Planner: `GroupPlan` from a specification and facts about the machines. Pure."""

from dsv4_operator.planning.facts import Facts, NodeFacts, catalog_facts
from dsv4_operator.planning.planner import plan_group
from dsv4_operator.planning.revision import revision
from dsv4_operator.planning.setup import PlanRefused

__all__ = ["Facts", "NodeFacts", "PlanRefused", "catalog_facts", "plan_group", "revision"]
