"""The lease of a host under arbitrary schedules of loops, restarts and late requests."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.api import load
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.hosts.backend import HostsBackend, _Refused
from dsv4_operator.backends.hosts.documents import LEASE_SECONDS, Claim, HostReport, Inventory, Lease, LeaseRefused
from dsv4_operator.backends.hosts.documents import Host as Place
from dsv4_operator.backends.local.state import DeploymentState

NANO = Path(__file__).parents[3] / "examples" / "nano.yaml"

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


class Services:
    """The client of two host services: each has a lease and perhaps a problem."""

    def __init__(self) -> None:
        self.hosts = {"10.0.0.1": Host(), "10.0.0.2": Host()}
        self.problems: dict[str, Exception] = {}

    def _report(self, url: str) -> HostReport:
        address = url.split("/")[2].partition(":")[0]
        name = "ab"[list(self.hosts).index(address)]
        lease = self.hosts[address].lease.report(self.hosts[address].now)
        return HostReport(host=name, boot="x", lease=lease, members=(), fenced={}, cpus=1, memory_bytes=1)

    async def report(self, url: str) -> HostReport:
        return self._report(url)

    async def post(self, url: str, body: object) -> HostReport:
        address = url.split("/")[2].partition(":")[0]
        if address in self.problems:
            raise self.problems[address]
        if not self.hosts[address].ask(body.claim):  # type: ignore[attr-defined]
            raise LeaseRefused("outdated")
        return self._report(url)


def loop(root: Path, services: Services) -> HostsBackend:
    inventory = Inventory(hosts=(Place(name="a", address="10.0.0.1"), Place(name="b", address="10.0.0.2")))
    state = DeploymentState(root, "nano")
    backend = HostsBackend(state, inventory, load(NANO.read_text()), key="k", holder="me", changed=lambda: None)
    backend._client = services  # type: ignore[assignment]
    return backend


async def test_a_machine_with_a_full_disk_does_not_keep_the_others_without_a_loop(tmp_path: Path) -> None:
    services = Services()
    full = _Refused("No space left on device (lease.json)", 507)
    services.problems["10.0.0.2"] = full
    backend = loop(tmp_path, services)
    assert (await backend._claimed()).epoch == 1
    assert services.hosts["10.0.0.1"].lease.holder == "me"
    assert backend._silent(backend._machines["b"]).reason == "DiskFull"
    services.problems["10.0.0.1"] = full
    with pytest.raises(BackendError, match=r"10.0.0.1\" of a .*No space left.*10.0.0.2\" of b "):
        await loop(tmp_path, services)._claimed()


async def test_the_lease_in_an_old_report_ends_too(tmp_path: Path) -> None:
    services = Services()
    backend = loop(tmp_path, services)
    assert services.hosts["10.0.0.2"].ask(Claim(holder="other", epoch=7))
    with pytest.raises(BackendError, match="'other' manages the members on b"):
        await backend._claimed()

    # That machine, and the other loop on it, lose power.
    async def silent(url: str) -> HostReport:
        if "10.0.0.2" in url:
            raise TimeoutError
        return services._report(url)

    services.report = silent  # type: ignore[method-assign]
    services.problems["10.0.0.2"] = TimeoutError()
    backend._machines["b"].heard = time.monotonic() - LEASE_SECONDS - 1
    assert (await backend._claimed()).epoch == 8


async def test_machines_that_cannot_be_asked_are_not_absent(tmp_path: Path) -> None:
    services = Services()
    backend = loop(tmp_path, services)
    await backend._claimed()
    services.problems["10.0.0.2"] = OSError(errno.EMFILE, "Too many open files")
    with pytest.raises(BackendError, match="Too many open files"):
        await backend._refresh()
    services.problems["10.0.0.2"] = OSError(errno.ECONNREFUSED, "Connection refused")
    await backend._refresh()
