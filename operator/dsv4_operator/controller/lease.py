"""Leader election with a Lease (`coordination.k8s.io/v1`): only the holder acts."""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections.abc import Callable

from dsv4_operator.kube import LEASES, AlreadyExists, Client, Conflict, KubeError, Manifest

_log = logging.getLogger("dsv4")

LEASE_SECONDS = 15
"""Age at which a lease may be taken; the default of Kubernetes' own components."""
DEADLINE_SECONDS = 10.0
"""Time without a renewal after which a holder stops: 5 s before another candidate may start."""
RETRY_SECONDS = 2.0
"""Interval between renewals, and between attempts of waiting candidates."""


class NotLeading(KubeError):
    """This process may not write, because it does not hold the lease."""


class Lease:
    """One candidate for one lease.

    Clocks of different machines are not compared: a lease is taken when *this* process saw it unchanged for longer than
    its duration, as in client-go. A holder counts from the *start* of its last renewal.
    """

    def __init__(
        self,
        kube: Client,
        namespace: str,
        name: str,
        identity: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        kube: client without a guard that checks this lease.
        namespace: of the Lease.
        name: of the Lease.
        identity: unique name of this process.
        clock: monotonic seconds.
        """
        self._kube, self._namespace, self._name = kube, namespace, name
        self.identity = identity
        self._clock = clock
        self._renewed: float | None = None
        self._held: Manifest | None = None
        self._seen: tuple[str, float] | None = None
        """Version of another holder's lease, and the time at which it was first seen."""

    @property
    def holds(self) -> bool:
        """Return whether this process may act now."""
        return self._renewed is not None and self._clock() - self._renewed < DEADLINE_SECONDS

    def check(self) -> None:
        """Check the lease before a write.

        Raises:
            NotLeading: this process may not act.
        """
        if not self.holds:
            raise NotLeading(f"{self.identity} does not hold the lease {self._namespace}/{self._name}")

    async def acquire(self) -> None:
        """Wait until this process holds the lease."""
        waiting: str | None = None
        while True:
            try:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    holder = await self._try()
            except Exception as error:
                _log.warning("the lease %s/%s cannot be read: %s", self._namespace, self._name, error)
            else:
                if holder is None:
                    return
                if holder != waiting:
                    _log.info("waiting: %s holds the lease %s/%s", holder, self._namespace, self._name)
                    waiting = holder
            await asyncio.sleep(RETRY_SECONDS)

    async def keep(self) -> None:
        """Renew until the lease is lost, then return."""
        while self.holds:
            await asyncio.sleep(RETRY_SECONDS)
            try:
                async with asyncio.timeout(DEADLINE_SECONDS / 2):
                    if not await self._renew():
                        break
            except Exception as error:
                # An unreadable answer counts as none; the deadline decides.
                _log.warning("the lease cannot be renewed: %s", error)
        self._renewed = None
        _log.error("the lease %s/%s is lost", self._namespace, self._name)

    async def release(self) -> None:
        """Release the lease for the next holder; best effort, within 2 s."""
        held, self._renewed, self._held = self._held, None, None
        if held is None:
            return
        spec = held["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": micro_time()}
        try:
            async with asyncio.timeout(2.0):
                await self._kube.replace(held | {"spec": spec})
        except Exception as error:
            _log.warning("the lease was not released and runs out by itself: %s", error)

    async def _try(self) -> str | None:
        """Take the lease if possible; return None, or the present holder."""
        begun = self._clock()
        known = await self._kube.get(LEASES, self._namespace, self._name)
        if known is None:
            fresh = {
                "apiVersion": LEASES.api_version,
                "kind": LEASES.kind,
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._spec(0),
            }
            try:
                self._held, self._renewed = await self._kube.create(fresh), begun
            except AlreadyExists:
                return "somebody"
            return None
        spec = known.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self.identity) and not self._expired(known, spec, begun):
            return str(holder)
        wanted = known | {"spec": self._spec(int(spec.get("leaseTransitions") or 0) + 1)}
        try:
            self._held, self._renewed = await self._kube.replace(wanted), begun
        except Conflict:
            return "somebody"
        return None

    def _expired(self, known: Manifest, spec: Manifest, now: float) -> bool:
        version = known["metadata"]["resourceVersion"]
        if self._seen is None or self._seen[0] != version:
            self._seen = version, now
        return now - self._seen[1] > float(spec.get("leaseDurationSeconds") or LEASE_SECONDS)

    async def _renew(self) -> bool:
        """Return whether the lease is still held by this process; `KubeError` if that is unknown."""
        held = self._held
        if held is None:
            return False
        begun = self._clock()
        try:
            self._held = await self._kube.replace(held | {"spec": held["spec"] | {"renewTime": micro_time()}})
        except Conflict:
            found = await self._kube.get(LEASES, self._namespace, self._name)
            if found is None or (found.get("spec") or {}).get("holderIdentity") != self.identity:
                return False
            # Held by this process: the answer of a renewal before `begun` was lost. Repeat it.
            begun = self._clock()
            self._held = await self._kube.replace(found | {"spec": found["spec"] | {"renewTime": micro_time()}})
        self._renewed = begun
        return True

    def _spec(self, transitions: int) -> Manifest:
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": micro_time(),
            "renewTime": micro_time(),
            "leaseTransitions": transitions,
        }


def micro_time() -> str:
    """Return the time now as `metav1.MicroTime`."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
