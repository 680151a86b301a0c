"""Process of `dsv4 up`: the reconcile loop over one file; its members end with it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from dsv4_operator.api import DSV4Deployment, Hardware
from dsv4_operator.backends.local import gpus, network
from dsv4_operator.backends.local.backend import LocalBackend
from dsv4_operator.backends.local.gateway import (
    LOOPBACK,
    Listeners,
    LocalGateways,
    Publisher,
    bind_loopback,
    check_keyless,
    check_secrets,
)
from dsv4_operator.backends.local.gpus import Card, claimed
from dsv4_operator.backends.local.software import Software, check_compilers, cuda_software
from dsv4_operator.backends.local.state import NETWORK_ANNOTATION, DeploymentState, StateError
from dsv4_operator.controller.queue import FIRST_BACKOFF_SECONDS, wait_for
from dsv4_operator.controller.reconcile import Endpoints, Reconciler
from dsv4_operator.planning.catalog import DASHBOARD_PORT
from dsv4_operator.planning.setup import head_ports
from dsv4_runtime.contract.gateway import GroupRoute
from dsv4_runtime.contract.recovery import backoff
from dsv4_runtime.util.files import log_to, replace_file

_log = logging.getLogger("dsv4")

_LONGEST_BACKOFF_SECONDS = 15.0
"""Longest backoff of a reconcile that failed as a whole. Its parts have their own backoffs."""


def main() -> None:
    """Run the loop until SIGTERM. Exit codes: 0 ended as asked, 2 cannot start, and `startup-error` says why."""
    parser = argparse.ArgumentParser(prog="dsv4-standalone", description=main.__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--attached", type=int, metavar="PID", help="end when this parent process ends")
    options = parser.parse_args()
    try:
        state = DeploymentState(options.state_dir, options.name)
    except StateError as error:
        parser.error(str(error))
    log_to(state.log)
    try:
        if options.attached is not None:
            network.die_with_parent(signal.SIGTERM)
            if os.getppid() != options.attached:
                # The parent ended before the signal was registered.
                return
        with state.lock():
            _run(state)
    except StateError as error:
        replace_file(state.directory / "startup-error", f"{error}\n")
        sys.exit(2)


def _run(state: DeploymentState) -> None:
    deployment = state.manifest()
    if deployment is None:
        raise StateError(f"{state.name!r} has no manifest; start it with `dsv4 up FILE`")
    # Files of a killed loop, whose members ended with it.
    state.forget_incarnations()
    check_secrets(deployment, state)
    if deployment.spec.topology.hardware is Hardware.CPU:
        check_compilers(cpu=True)
        _enter(state, deployment)
        return
    # Held until the end of this process, in the machine's own network.
    with claimed(deployment.spec.topology, gpus.find(), max(deployment.spec.replicas, 1)) as cards:
        _enter(state, deployment, cards, cuda_software(deployment, state, cards))


def _enter(
    state: DeploymentState,
    deployment: DSV4Deployment,
    cards: tuple[Card, ...] = (),
    software: Software | None = None,
) -> None:
    """Enter a private network if possible, and run the loop there."""
    ports = deployment.spec.network.ports
    listeners = bind_loopback({"api": ports.api, "dashboard": ports.dashboard})
    try:
        network.enter_private_network()
    except network.NoNamespacesError as error:
        check_keyless(deployment, str(error))
        note = f"shared: the members share this machine's network, because {error}"
        # The member itself listens on these ports and two more; conflicts are reported before the start.
        others = bind_loopback({"agent": ports.agent, "gcs": ports.gcs})
        for listener in (*listeners.values(), *others.values()):
            listener.close()
        listeners = {}
    else:
        note = "private: each member has an address of its own"
    _log.info("network %s", note)
    annotations = {**deployment.metadata.annotations, NETWORK_ANNOTATION: note}
    metadata = deployment.metadata.model_copy(update={"annotations": annotations})
    deployment = deployment.model_copy(update={"metadata": metadata})
    # Before any slow step, so that the status of an earlier run is not taken for this one's.
    state.save_object(deployment)
    for card in cards:
        _log.info("%s", card.title)
    wake, gateways = asyncio.Event(), _front(state, deployment)
    backend = LocalBackend(
        state, isolated=bool(listeners), changed=wake.set, cards=cards, software=software, gateways=gateways
    )
    asyncio.run(_loop(state, deployment, listeners, backend, gateways, wake))


async def _loop(
    state: DeploymentState,
    deployment: DSV4Deployment,
    listeners: Listeners,
    backend: LocalBackend,
    gateways: LocalGateways,
    event: asyncio.Event,
) -> None:
    stop = asyncio.Event()

    def end() -> None:
        stop.set()
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)
    ports = deployment.spec.network.ports
    publisher = Publisher(network.address(0), head_ports(deployment, isolated=True).dashboard or DASHBOARD_PORT)
    if listeners:
        await gateways.start(listeners["api"])
        await publisher.start(listeners["dashboard"])

    async def save(changed: DSV4Deployment) -> None:
        state.save_object(changed)

    reconciler = Reconciler(
        backend,
        Endpoints(f"http://{LOOPBACK}:{ports.api}/v1", f"http://{LOOPBACK}:{ports.dashboard}"),
        save=save,
    )
    try:
        failures = 0
        drained = False
        while True:
            event.clear()
            if not state.directory.exists() and not stop.is_set():
                # Without its directory, `dsv4 down` cannot find the deployment.
                _log.error("%s was removed: ending", state.directory)
                stop.set()
            if stop.is_set() and not drained:
                # Before the members and the engine end.
                await gateways.stop()
                drained = True
            try:
                pause = await reconciler.reconcile(deployment, deleting=stop.is_set())
                failures = 0
            except Exception:
                _log.exception("reconciling %s failed", deployment.metadata.name)
                failures += 1
                pause = backoff(failures, first=FIRST_BACKOFF_SECONDS, longest=_LONGEST_BACKOFF_SECONDS)
            if reconciler.ended:
                break
            await wait_for(event, pause)
    finally:
        await gateways.stop()
        publisher.close()
        await reconciler.close()
        await backend.close()
        _log.info("ended")


def _front(state: DeploymentState, deployment: DSV4Deployment) -> LocalGateways:
    """Return the gateways of a private network, with the addresses of the groups' heads."""
    ports, size = head_ports(deployment, isolated=True), deployment.spec.topology.nodes_per_group
    heads = []
    for group in range(max(deployment.spec.replicas, 1)):
        host = f"http://{network.address(group * size)}"
        heads.append(GroupRoute(group=group, agent=f"{host}:{ports.agent}", api=f"{host}:{ports.api}"))
    return LocalGateways(deployment, state, heads)


if __name__ == "__main__":
    main()
