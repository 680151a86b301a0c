"""The reconcile loop over one file, a child of the supervisor: members are on this machine (`dsv4 up`), or on those of
the inventory in the deployment's directory.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dsv4_operator.api import (
    ConditionStatus,
    ConditionType,
    DeploymentPhase,
    DSV4Deployment,
    GroupPhase,
    Hardware,
    Reason,
)
from dsv4_operator.backends.base import Backend, BackendError
from dsv4_operator.backends.hosts.backend import HostsBackend
from dsv4_operator.backends.hosts.documents import DOWN, HOST_KEY, INVENTORY, InvalidInventory, load_inventory
from dsv4_operator.backends.hosts.members import machine_id
from dsv4_operator.backends.hosts.service import read_key
from dsv4_operator.backends.local import gpus, network
from dsv4_operator.backends.local.backend import LocalBackend
from dsv4_operator.backends.local.gateway import (
    LocalGateways,
    Publisher,
    bind_loopback,
    bind_ports,
    check_keyless,
    check_secrets,
    endpoint,
    give_listener,
    is_held,
    take_listener,
)
from dsv4_operator.backends.local.gpus import Card, claim_card, claimed
from dsv4_operator.backends.local.software import Software, check_compilers, cuda_software, needs_toolkit
from dsv4_operator.backends.local.state import NETWORK_ANNOTATION, DeploymentState, StateError
from dsv4_operator.backends.local.supervisor import BEAT_SECONDS, LOCK, NETWORK, OUTSIDE, STATUS, Processes
from dsv4_operator.controller.queue import FIRST_BACKOFF_SECONDS, Part, wait_for
from dsv4_operator.controller.reconcile import Endpoints, Reconciler
from dsv4_operator.planning.catalog import DASHBOARD_PORT
from dsv4_operator.planning.setup import head_ports
from dsv4_runtime.contract.gateway import GroupRoute
from dsv4_runtime.contract.recovery import backoff
from dsv4_runtime.util.clock import unix_time
from dsv4_runtime.util.files import format_logs, log_to, replace_file

_log = logging.getLogger("dsv4")

_LONGEST_BACKOFF_SECONDS = 15.0
"""Longest backoff of a reconcile that failed as a whole. Its parts have their own backoffs."""


_STORAGE = Part("storage", _LONGEST_BACKOFF_SECONDS)
_EXPECT_SECONDS = 10.0
"""Time after which the gateways count a loop as overdue that has stopped between two reconciles."""
_QUEUE_SECONDS, _HELD_SECONDS = 60.0, 0.5
"""In an upgrade, the longest time without gateways, and the interval of checks whether it still goes on."""
_WRITE_SECONDS = 2.0
"""Interval between attempts to write the status to a full disk."""


class _NotSaved(BackendError):
    reason = Reason.STATE_NOT_SAVED


def main() -> None:
    """Run the loop until SIGTERM. Exit codes: 0 ended on request, 2 cannot start (reason: `startup-error`)."""
    parser = argparse.ArgumentParser(prog="dsv4-standalone", description=main.__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--supervisor", type=int, metavar="FD", required=True, help="connection to the supervisor")
    options = parser.parse_args()
    try:
        state = DeploymentState(options.state_dir, options.name)
    except StateError as error:
        parser.error(str(error))
    log_to(state.log)
    format_logs(None, lambda: {"deployment": state.name})
    processes = Processes(socket.socket(fileno=options.supervisor))
    try:
        if LOCK in processes.kept:
            _run(state, processes)
            return
        with state.lock(owner=os.getppid()) as descriptor:
            processes.keep(LOCK, descriptor)
            _run(state, processes)
    except StateError as error:
        replace_file(state.directory / "startup-error", f"{error}\n")
        sys.exit(2)


def _run(state: DeploymentState, processes: Processes) -> None:
    text = processes.kept_text(STATUS)
    if (state.directory / INVENTORY).exists():
        _prepare_hosts(state, _saved(state) if text is None else DSV4Deployment.model_validate_json(text), processes)
        return
    if text is not None:
        # An earlier loop ended without request; everything that it started runs on.
        _log.warning("the loop %s; this process continues its work", processes.restarts[-1][1])
        _prepare(state, DSV4Deployment.model_validate_json(text), processes)
        return
    deployment = state.manifest()
    if deployment is None:
        raise StateError(f"{state.name!r} has no manifest; start it with `dsv4 up FILE`")
    # Files of a killed supervisor, whose members ended with it.
    state.forget_incarnations()
    check_secrets(deployment, state)
    _prepare(state, deployment, processes)


def _prepare(state: DeploymentState, deployment: DSV4Deployment, processes: Processes) -> None:
    """Claim the GPUs, enter a private network if possible, and run the loop there."""
    if deployment.spec.topology.hardware is Hardware.CPU:
        check_compilers(cpu=True)
        _enter(state, deployment, processes)
        return

    def claim(card: Card) -> socket.socket | None:
        """Claim a card until the end of the supervisor, in the machine's own network."""
        name = f"gpu-{card.uuid}"
        if name in processes.kept:
            return socket.socket(fileno=os.dup(processes.kept[name]))
        if STATUS in processes.kept:
            return None
        if (found := claim_card(card)) is not None:
            processes.keep(name, found.fileno())
        return found

    topology, groups = deployment.spec.topology, max(deployment.spec.replicas, 1)
    with claimed(topology, gpus.find(), groups, claim=claim) as cards:
        _enter(state, deployment, processes, cards, cuda_software(deployment, state, cards))


def _enter(
    state: DeploymentState,
    deployment: DSV4Deployment,
    processes: Processes,
    cards: tuple[Card, ...] = (),
    software: Software | None = None,
) -> None:
    """Enter a private network if possible, and run the loop there."""
    if STATUS in processes.kept:
        # The supervisor is in the network, and so is this process.
        isolated = NETWORK in processes.kept
    else:
        isolated, note = _enter_network(deployment, processes)
        _log.info("network %s", note)
        annotations = {**deployment.metadata.annotations, NETWORK_ANNOTATION: note}
        metadata = deployment.metadata.model_copy(update={"annotations": annotations})
        deployment = deployment.model_copy(update={"metadata": metadata})
    for card in cards:
        _log.info("%s", card.title)
    gateways = _front(state, deployment, processes)
    if isolated:
        gateways.keep_sockets()
    if STATUS not in processes.kept:
        # Before any slow step, so that the status of an earlier run is not taken for this one's.
        state.save_object(deployment)
        processes.keep_text(STATUS, deployment.to_json())
    wake = asyncio.Event()
    backend = LocalBackend(
        state, processes, isolated=isolated, changed=wake.set, cards=cards, software=software, gateways=gateways
    )
    front = _Front(gateways, network.address(0), deployment, started=isolated)
    asyncio.run(_loop(state, deployment, processes, backend, front, wake, adopt=backend.adopt))


def _saved(state: DeploymentState) -> DSV4Deployment:
    """Return the manifest with the status that an earlier loop saved: its numbers of incarnations were used.

    Raises:
        StateError: there is no manifest.
    """
    deployment, earlier = state.manifest(), state.object()
    if deployment is None:
        raise StateError(f"{state.name!r} has no manifest; start it with `dsv4 up FILE`")
    if earlier is None:
        return deployment
    # A loss of power leaves the status of a deployment that is ready, which a client would take for the present one.
    unknown = {
        "status": ConditionStatus.FALSE,
        "reason": Reason.GROUP_STOPPED,
        "message": "the loop was started",
        "last_transition_time": unix_time(),
    }
    conditions = tuple(
        condition.model_copy(update=unknown)
        if condition.type is ConditionType.READY and condition.status is ConditionStatus.TRUE
        else condition
        for condition in earlier.status.conditions
    )
    # Groups that were ended on request begin with the whole restart budget, as on one machine.
    groups = tuple(
        group.model_copy(update={"restarts": ()}) if group.phase is GroupPhase.STOPPED else group
        for group in earlier.status.groups
    )
    changed = {"conditions": conditions, "groups": groups, "ready_replicas": 0}
    if conditions != earlier.status.conditions:
        changed["phase"] = DeploymentPhase.PENDING
    status = earlier.status.model_copy(update=changed)
    return deployment.model_copy(update={"status": status})


def _prepare_hosts(state: DeploymentState, deployment: DSV4Deployment, processes: Processes) -> None:
    """Run the loop over the machines of the inventory; the gateways run on this one.

    Raises:
        StateError: the inventory, the host key or a secret cannot be read, or a port is in use.
    """
    try:
        inventory = load_inventory((state.directory / INVENTORY).read_text())
    except (OSError, UnicodeDecodeError, InvalidInventory) as error:
        raise StateError(f"{state.directory / INVENTORY}: {error}") from error
    key = read_key(state.directory / HOST_KEY)
    check_secrets(deployment, state)
    software = _same_software(deployment, state, several=len(inventory.hosts) > 1)
    if fresh := "api" not in processes.kept:
        for name, listener in bind_ports(deployment, take_listener(state, deployment)).items():
            with listener:
                processes.keep(name, listener.fileno())
    head, size = head_ports(deployment, isolated=True), deployment.spec.topology.nodes_per_group
    addresses = [host.address for host in inventory.hosts[::size]][: max(deployment.spec.replicas, 1)]
    heads = [
        GroupRoute(group=group, agent=f"http://{address}:{head.agent}", api=f"http://{address}:{head.api}")
        for group, address in enumerate(addresses)
    ]
    gateways = LocalGateways(deployment, state, heads, processes)
    gateways.keep_sockets()
    if STATUS not in processes.kept:
        state.save_object(deployment)
        processes.keep_text(STATUS, deployment.to_json())
    wake = asyncio.Event()
    backend = HostsBackend(
        state,
        inventory,
        deployment,
        key=key,
        holder=f"{machine_id()}:{state.directory}",
        changed=wake.set,
        software=software,
        gateways=gateways,
    )
    front = _Front(gateways, addresses[0], deployment, held=lambda: fresh and is_held(state))

    def leave() -> None:
        with processes.socket("api") as listener:
            give_listener(state, listener)

    deletes = (state.directory / DOWN).exists
    asyncio.run(_loop(state, deployment, processes, backend, front, wake, leave=leave, deletes=deletes))


def _same_software(deployment: DSV4Deployment, state: DeploymentState, *, several: bool) -> Software:
    """Return the software for engines, which must have the same paths on all machines if there are several.

    Raises:
        StateError: something is missing on this machine, or a path exists on it alone.
    """
    if deployment.spec.topology.hardware is Hardware.CPU:
        check_compilers(cpu=True)
        return Software()
    cards = gpus.find().cards
    software = cuda_software(deployment, state, cards)
    if several and Path(software.cuda_home).is_relative_to(state.root):
        if not needs_toolkit(deployment.spec.engine, (card.capability[0] for card in cards)):
            return replace(software, cuda_home="")
        raise StateError(
            "several machines cannot use the CUDA toolkit of Python packages; install NVIDIA's toolkit at the same "
            "path on all of them (/usr/local/cuda)"
        )
    return software


def _enter_network(deployment: DSV4Deployment, processes: Processes) -> tuple[bool, str]:
    """Open the listening sockets and enter a private network; return whether that is possible, and a note for users."""
    ports = deployment.spec.network.ports
    listeners = bind_ports(deployment)
    with open("/proc/self/ns/net", "rb") as outside:
        try:
            network.enter_private_network()
        except network.NoNamespacesError as error:
            check_keyless(deployment, str(error))
            # The member itself listens on these ports and two more; conflicts are reported before the start.
            others = bind_loopback({"agent": ports.agent, "gcs": ports.gcs})
            for listener in (*listeners.values(), *others.values()):
                listener.close()
            return False, f"shared: the members share this machine's network, because {error}"
        processes.keep(OUTSIDE, outside.fileno())
    with open("/proc/self/ns/net", "rb") as namespace:
        processes.keep(NETWORK, namespace.fileno())
    for name, listener in listeners.items():
        with listener:
            processes.keep(name, listener.fileno())
    return True, "private: each member has an address of its own"


class _Front:
    """The front end on this machine: gateways, and the published dashboard of the first group."""

    def __init__(
        self,
        gateways: LocalGateways,
        address: str,
        deployment: DSV4Deployment,
        *,
        started: bool = True,
        held: Callable[[], bool] = lambda: False,
    ) -> None:
        """`address` is the first head's. If not `started`, users connect to the engine directly. `held` returns whether
        another process holds the listening socket, for earlier software if this one fails."""
        self._gateways, self._held = gateways, held
        self._opening: asyncio.Task[None] | None = None
        port = head_ports(deployment, isolated=True).dashboard or DASHBOARD_PORT
        self._publisher = Publisher(address, port)
        self._started = started

    async def start(self, processes: Processes) -> None:
        """Start to serve on the kept sockets."""
        if self._started:
            if self._held():
                self._opening = asyncio.create_task(self._open())
            else:
                await self._gateways.start("api")
            await self._publisher.start(processes.socket("dashboard"))

    async def _open(self) -> None:
        """Start the gateways once a group serves, and at the latest after `_QUEUE_SECONDS`.

        Until then clients wait in the queue of the listening socket, from which earlier software can take them. Those
        that a gateway has taken get status 503 at its end; but it keeps proxies from closing idle streams.
        """
        latest = time.monotonic() + _QUEUE_SECONDS
        while time.monotonic() < latest and not self._gateways.serving.is_set() and self._held():
            await wait_for(self._gateways.serving, _HELD_SECONDS)
        await self._gateways.start("api")

    async def stop(self) -> None:
        """Drain and end the gateways."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        await self._gateways.stop()

    def expect(self, due: float) -> None:
        """See `LocalGateways.expect`."""
        self._gateways.expect(due)

    def due(self) -> float:
        """See `LocalGateways.due`."""
        return self._gateways.due()

    def close(self) -> None:
        """Stop listening for the dashboard."""
        self._publisher.close()


class Passes:
    """Time from which on a successful reconcile of the loop is overdue. Times are monotonic."""

    def __init__(self, now: float) -> None:
        self.due = now

    def begin(self, now: float) -> None:
        """Note the begin of a reconcile, possibly before it was due. Failures do not move the time."""
        self.due = min(self.due, now)

    def end(self, now: float, pause: float) -> None:
        """Note the end of a successful reconcile, after which the next one begins within `pause` seconds."""
        self.due = now + pause

    def expected(self, now: float) -> float:
        """Return the time to tell now: in a long pause a near one, because telling goes on only while the loop runs."""
        return min(self.due, now + _EXPECT_SECONDS)


async def _loop(
    state: DeploymentState,
    deployment: DSV4Deployment,
    processes: Processes,
    backend: Backend,
    front: _Front,
    event: asyncio.Event,
    *,
    adopt: Callable[[], None] = lambda: None,
    leave: Callable[[], None] = lambda: None,
    deletes: Callable[[], bool] = lambda: True,
) -> None:
    """Reconcile until SIGTERM.

    Args:
        state: files of the deployment.
        deployment: the deployment with its latest status.
        processes: the connection to the supervisor.
        backend: runs the members.
        front: the front end.
        event: starts the next turn at once.
        adopt: called before the first turn, in the event loop.
        leave: called after SIGTERM, before the front end stops.
        deletes: returns after SIGTERM whether the members end with the loop.
    """
    stop = asyncio.Event()

    def end() -> None:
        stop.set()
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    processes.listen()
    if processes.ending:
        end()
    adopt()
    await front.start(processes)
    unsaved: DSV4Deployment | None = None

    async def save(changed: DSV4Deployment) -> None:
        # In memory the status outlives this process and a full disk.
        processes.keep_text(STATUS, changed.to_json())
        await write(changed)

    async def write(changed: DSV4Deployment) -> None:
        nonlocal unsaved
        unsaved = changed
        try:
            await asyncio.to_thread(state.save_object, changed)
        except OSError as error:
            reason = f"the state directory {state.directory} cannot be written: {error.strerror or error}"
            remedy = "the status is kept in memory; make space there"
            reconciler.report(_STORAGE, _NotSaved(f"{reason}; {remedy}"))
        else:
            unsaved = None
            reconciler.report(_STORAGE, None)

    # Overdue since the latest success, of an earlier loop too.
    passes = Passes(min(time.monotonic(), front.due()))

    async def tell() -> None:
        while True:
            front.expect(passes.expected(time.monotonic()))
            await asyncio.sleep(BEAT_SECONDS)

    telling = asyncio.create_task(tell())
    reconciler = Reconciler(
        backend,
        Endpoints(endpoint(deployment), f"http://{network.LOOPBACK}:{deployment.spec.network.ports.dashboard}"),
        save=save,
    )
    try:
        # An earlier loop may have left it in memory only, and the first reconcile replaces its conditions.
        await write(deployment)
        failures = 0
        drained = False
        while True:
            event.clear()
            if not state.directory.exists() and not stop.is_set():
                # Without its directory, `dsv4 down` cannot find the deployment.
                _log.error("%s was removed: ending", state.directory)
                stop.set()
            if stop.is_set() and not drained:
                leave()
                # Before the members and the engine end.
                await front.stop()
                drained = True
                if not deletes():
                    break
            passes.begin(time.monotonic())
            try:
                pause = await reconciler.reconcile(deployment, deleting=stop.is_set())
                failures = 0
                passes.end(time.monotonic(), pause)
            except Exception:
                _log.exception("reconciling %s failed", deployment.metadata.name)
                failures += 1
                pause = backoff(failures, first=FIRST_BACKOFF_SECONDS, longest=_LONGEST_BACKOFF_SECONDS)
            if reconciler.ended:
                break
            if unsaved is not None:
                await write(unsaved)
                pause = min(pause, _WRITE_SECONDS)
            await wait_for(event, pause)
    finally:
        telling.cancel()
        await front.stop()
        front.close()
        await reconciler.close()
        await backend.close()
        await processes.close()
        _log.info("ended")


def _front(state: DeploymentState, deployment: DSV4Deployment, processes: Processes) -> LocalGateways:
    """Return the gateways of a private network, with the addresses of the groups' heads."""
    ports, size = head_ports(deployment, isolated=True), deployment.spec.topology.nodes_per_group
    heads = []
    for group in range(max(deployment.spec.replicas, 1)):
        host = f"http://{network.address(group * size)}"
        heads.append(GroupRoute(group=group, agent=f"{host}:{ports.agent}", api=f"{host}:{ports.api}"))
    return LocalGateways(deployment, state, heads, processes)


if __name__ == "__main__":
    main()
