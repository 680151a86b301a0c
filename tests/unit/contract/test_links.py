"""Distinction of lost nodes and lost links for random reachability."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsv4_runtime.contract.recovery import HEARD_SECONDS, is_link_lost, link_message

LOST = 10.0


def silences(members: int, broken: set[tuple[int, int]]) -> dict[int, dict[int, float]]:
    """Return the silences that each member observes; a heartbeat needs both directions of a link."""

    def hears(one: int, other: int) -> bool:
        return not {(one, other), (other, one)} & broken

    ranks = range(members)
    return {one: {other: 0.3 if hears(one, other) else LOST for other in ranks if other != one} for one in ranks}


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int, int]:
    members = draw(st.integers(3, 8))
    observer, lost = draw(st.permutations(range(members)))[:2]
    return members, observer, lost


@given(groups())
def test_one_lost_direction_is_a_lost_link(group: tuple[int, int, int]) -> None:
    members, observer, lost = group
    for broken in ({(observer, lost)}, {(lost, observer)}, {(observer, lost), (lost, observer)}):
        views = silences(members, broken)
        assert is_link_lost(lost, observer, views)
        assert is_link_lost(observer, lost, views)


@given(groups(), st.data())
def test_a_node_that_reaches_no_other_is_lost(group: tuple[int, int, int], data: st.DataObject) -> None:
    members, observer, lost = group
    others = [rank for rank in range(members) if rank != lost]
    broken = {(lost, rank) if data.draw(st.booleans()) else (rank, lost) for rank in others}
    views = silences(members, broken)
    fresh = data.draw(st.sets(st.sampled_from(others))) | {observer}
    assert not is_link_lost(lost, observer, {rank: views[rank] for rank in fresh})


@given(groups(), st.data())
def test_the_majority_decides(group: tuple[int, int, int], data: st.DataObject) -> None:
    members, observer, lost = group
    every = [(one, other) for one in range(members) for other in range(members) if one != other]
    broken = set(data.draw(st.lists(st.sampled_from(every)))) | {(observer, lost)}
    views = silences(members, broken)
    hearing = sum(views[rank][lost] < HEARD_SECONDS for rank in range(members) if rank != lost)
    assert is_link_lost(lost, observer, views) is (hearing > 0 and hearing >= members - 1 - hearing)
    # Observations of the two members themselves and members without observations do not change the result.
    views[lost] = views[observer] = {}
    assert is_link_lost(lost, observer, views | {members: {}}) <= is_link_lost(lost, observer, views)


def test_both_ends_are_named() -> None:
    assert link_message(3, 1).startswith("rank 1 and rank 3 both run and no longer reach each other")
