"""Definition of a rule, its severity and its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from dsv4_operator.api import Reason
from dsv4_operator.planning.setup import Setup


class Severity(StrEnum):
    """Consequence of a broken rule."""

    REFUSE = "refuse"
    """There is no plan."""
    WARN = "warn"
    """There is one, and the user is told."""


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """One place where a deployment breaks a rule."""

    rule: str
    severity: Severity
    message: str
    """Field, value and remedy."""
    source: str
    """The evidence of the rule."""
    reason: Reason = Reason.PLAN_REFUSED

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Rule:
    """One row."""

    id: str
    severity: Severity
    condition: str
    """Condition under which it applies, for people."""
    check: Callable[[Setup], Iterator[str]]
    """Findings, each with the field and the value."""
    remedy: str
    """Remedy; empty where `check` says it."""
    source: str
    reason: Reason = Reason.PLAN_REFUSED

    def findings(self, chosen: Setup) -> Iterator[RuleFinding]:
        """Yield every place where `chosen` breaks the rule."""
        for text in self.check(chosen):
            message = f"{text}; {self.remedy}" if self.remedy else text
            yield RuleFinding(self.id, self.severity, message, self.source, self.reason)
