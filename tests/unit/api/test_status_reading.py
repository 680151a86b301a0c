"""A status that another version wrote is read as far as possible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.api import DeploymentStatus, FailureStatus, GroupPhase, GroupStatus
from dsv4_operator.api.status import read_status

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["groups", "phase", "members", "rank", "incarnation", "history", "time", "conditions", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_nothing_is_rejected(data: object) -> None:
    assert isinstance(read_status(data), DeploymentStatus)


def test_readable_parts_of_a_status_are_kept() -> None:
    status = read_status(
        {
            "phase": "FromTheFuture",
            "unknown": 1,
            "conditions": [{"type": "FromTheFuture"}],
            "groups": [
                {
                    "incarnation": 7,
                    "phase": "FromTheFuture",
                    "restarts": ["2026-01-31T12:00:00Z", "soon"],
                    "members": [{"role": "Head"}, {"rank": 1, "phase": "FromTheFuture"}],
                    "history": [{"time": "2026-01-31T12:00:00Z", "cause": "FromTheFuture"}],
                },
                5,
            ],
        }
    )
    assert len(status.groups) == 1
    group = status.groups[0]
    assert group.incarnation == 7
    assert group.phase is GroupPhase.PENDING
    assert len(group.restarts) == 1
    assert [member.rank for member in group.members] == [1]
    assert group.history[0].cause == "Unknown"
    assert status.conditions == ()


@pytest.mark.parametrize("data", [None, 3, "x", [], {"groups": "x"}])
def test_nonsense_is_an_empty_status(data: object) -> None:
    assert read_status(data) == DeploymentStatus()


def test_a_status_survives_being_written() -> None:
    failure = FailureStatus(time=1_800_000_000.123, message="gone", recover_seconds=2.5)
    group = GroupStatus(incarnation=3, restarts=(1_800_000_000.123,), history=(failure,), last_failure=failure)
    status = DeploymentStatus(groups=(group,), ready_replicas=1)
    assert DeploymentStatus.model_validate_json(status.to_json()) == status
    assert '"2027-01-15T08:00:00.123Z"' in status.to_json()
