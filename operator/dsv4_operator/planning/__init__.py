"""A specification and facts about the machines become a `GroupPlan`. Pure."""

from dsv4_operator.planning.facts import Facts, NodeFacts, catalog_facts
from dsv4_operator.planning.planner import plan_group
from dsv4_operator.planning.refused import PlanRefused
from dsv4_operator.planning.revision import revision

__all__ = ["Facts", "NodeFacts", "PlanRefused", "catalog_facts", "plan_group", "revision"]
