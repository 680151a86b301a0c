"""The lease of a host under arbitrary schedules of loops, restarts and late requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.backends.hosts.documents import LEASE_SECONDS, Claim, Lease, LeaseRefused

LOOPS = ("a", "b", "c")

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from(LOOPS)),
        st.tuples(st.just("act"), st.sampled_from(LOOPS)),
        # A request that was sent long ago.
        st.tuples(st.just("late"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.floats(0, 2 * LEASE_SECONDS)),
        st.tuples(st.just("restart"), st.floats(0, 1e6)),
    ),
    max_size=40,
)


@dataclass
class Host:
    """A host service: the lease, its file, and a monotonic clock with an arbitrary start value after a restart."""

    now: float = 1000.0
    lease: Lease = field(default_factory=Lease)
    accepted: list[tuple[Claim, float]] = field(default_factory=list)
    passed: float = 0.0
    """True time."""

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.passed += seconds

    def restart(self, clock: float) -> None:
        self.now = clock
        self.lease = Lease.restored(self.lease.holder, self.lease.epoch, clock)

    def ask(self, claim: Claim) -> bool:
        try:
            self.lease = self.lease.admit(claim, self.now)
        except LeaseRefused:
            return False
        self.accepted.append((claim, self.passed))
        return True


@given(STEPS)
def test_at_most_one_loop_acts_at_a_time(steps: list[tuple[str, object]]) -> None:
    host, claims, sent = Host(), dict[str, Claim](), list[Claim]()
    for kind, value in steps:
        if kind == "take":
            claim = Claim(holder=str(value), epoch=host.lease.epoch + 1)
            sent.append(claim)
            if host.ask(claim):
                claims[claim.holder] = claim
        elif kind == "act" and value in claims:
            sent.append(claims[str(value)])
            host.ask(claims[str(value)])
        elif kind == "late" and sent:
            host.ask(sent[int(str(value)) % len(sent)])
        elif kind == "wait":
            host.wait(float(str(value)))
        elif kind == "restart":
            host.restart(float(str(value)))
    for (one, before), (other, after) in zip(host.accepted, host.accepted[1:], strict=False):
        assert one.epoch <= other.epoch
        assert (one.holder == other.holder) or (one.epoch < other.epoch and after - before >= LEASE_SECONDS)


@given(st.sampled_from(LOOPS), st.integers(1, 5), st.floats(0, 1e6), st.floats(0, 1e3))
def test_a_holder_is_never_delayed(holder: str, epoch: int, begun: float, later: float) -> None:
    lease = Lease().admit(Claim(holder=holder, epoch=epoch), begun)
    # Requests of the holder, and of a loop that continues its work, also after a restart of the machine.
    assert lease.admit(Claim(holder=holder, epoch=epoch), begun + later).epoch == epoch
    assert lease.admit(Claim(holder=holder, epoch=epoch + 1), begun).epoch == epoch + 1
    again = Lease.restored(holder, epoch, later)
    assert again.admit(Claim(holder=holder, epoch=epoch + 1), later).holder == holder


def test_another_loop_gets_it_after_the_time_limit() -> None:
    lease = Lease().admit(Claim(holder="a", epoch=1), 5.0)
    other = Claim(holder="b", epoch=2)
    with pytest.raises(LeaseRefused, match="'a' has the lease for another 15 s"):
        lease.admit(other, 5.0)
    with pytest.raises(LeaseRefused):
        lease.admit(other, 5.0 + LEASE_SECONDS - 0.01)
    taken = lease.admit(other, 5.0 + LEASE_SECONDS)
    assert (taken.holder, taken.epoch) == ("b", 2)
    with pytest.raises(LeaseRefused, match="epoch 1 of 'a' is outdated"):
        taken.admit(Claim(holder="a", epoch=1), 1e9)
    # Two loops chose the same number.
    with pytest.raises(LeaseRefused, match="outdated"):
        taken.admit(Claim(holder="a", epoch=2), 1e9)
    assert taken.report(5.0 + LEASE_SECONDS).seconds == LEASE_SECONDS
