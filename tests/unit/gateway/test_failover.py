"""Real processes: a gateway, two groups, and the death of one of them under clients."""

from __future__ import annotations

import gateway_groups


def test_a_killed_group_costs_no_request() -> None:
    found = gateway_groups.failover(5.0, clients=8)
    assert found.failed == 0
    assert found.under == 8
    assert len(found.after) >= 8
    # What is new does not wait for the lost group's verdict.
    assert max(found.after) < 1.0
