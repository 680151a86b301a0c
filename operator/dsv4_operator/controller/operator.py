"""`dsv4-operator`: reconciles every DSV4Deployment of a cluster."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4_operator.api import ClusterPolicy, DSV4Deployment
from dsv4_operator.api.policy import PolicyError, parse_policy
from dsv4_operator.api.spec import KUBERAY_BACKEND
from dsv4_operator.backends import registry
from dsv4_operator.builders import names
from dsv4_operator.controller.admission import AdmissionServer
from dsv4_operator.controller.deployments import Dependencies, Deployments
from dsv4_operator.controller.lease import Lease
from dsv4_operator.controller.observability import Fleet, OperatorMetrics, PageServer, ProbeServer, Recorder
from dsv4_operator.controller.queue import Part, WorkQueue, is_expected
from dsv4_operator.controller.reconcile import Endpoints, StatusLost
from dsv4_operator.controller.watching import DeploymentWatch
from dsv4_operator.kube import (
    DSV4_DEPLOYMENTS,
    Access,
    AccessError,
    Client,
    Forbidden,
    KubeError,
    Manifest,
    NodeCache,
    OwnedCache,
    PodCache,
    RayClusterCache,
    find_access,
)
from dsv4_operator.kube.access import SERVICE_ACCOUNT
from dsv4_operator.kube.cache import DeploymentKey, PodKey
from dsv4_operator.lifecycle import Event
from dsv4_operator.lifecycle.decide import RESYNC_SECONDS
from dsv4_runtime.util import LOG_FORMAT, TRACES, trace_receiver
from dsv4_runtime.util.files import LOG_FORMATS, format_logs, is_json, log_to, raise_file_limit

_log = logging.getLogger("dsv4")

LEASE_NAME = "dsv4-operator"
_WORKERS = 16
"""Reconciles at a time: with 64, requests of 1,000 groups that form wait until they time out, and are repeated."""
_MIN_INTERVAL_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 15.0
"""Longest backoff of a reconcile that failed as a whole. Its parts have their own backoffs."""
_CERTIFICATES = Path("/etc/dsv4/webhook")
_PAGE_KEYS = Path("/etc/dsv4/page/keys")
_STANDBY_LIST_SECONDS = 5.0
"""Interval at which a process without the lease lists the deployments for viewers of its status page."""
_DEFINITION_SECONDS = 5.0
_CACHES_SECONDS = 5.0
# The longest reconcile ends the members of a group one after the other, each within its grace period.
_LONGEST_TURN_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """Options of the operator process."""

    namespaces: tuple[str, ...]
    """Namespaces of the watched deployments; empty: all."""
    lease_namespace: str
    metrics_port: int
    webhook_port: int | None
    webhook_certificates: Path
    identity: str
    """Unique name of this process."""
    page_port: int | None
    """Port of the status page; None: there is none."""
    page_keys: Path
    """File with the keys of the status page."""
    runtime_image: str
    """Image of members and gateways whose deployment names none."""
    policy: ClusterPolicy
    """Limits on the use of nodes by deployments."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of agents and gateways."""


class CannotServe(Exception):
    """A port or a certificate cannot be used; the text names the flag and the reason."""


class DependencyLost(Exception):
    """A resource that the process needs is lost; the process ends, and its successor starts anew."""


def main() -> None:
    """Run until SIGTERM. Exit codes: 0 ended on request, 1 lost the lease or the watch, 2 cannot start."""
    arguments = command_line().parse_args()
    # Each group has a connection to its head.
    raise_file_limit()
    log_to(None)
    format_logs(arguments.log_format)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # It warns that it ignores signals, which is intended in its thread, and logs the end of its watch with a traceback
    # for each of its tasks; `DeploymentWatch` logs one line.
    logging.getLogger("kopf._core.reactor").setLevel(logging.CRITICAL)
    try:
        access = find_access(kubeconfig=arguments.kubeconfig)
    except AccessError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    try:
        policy = parse_policy(arguments.policy.read_text()) if arguments.policy is not None else ClusterPolicy()
    except (OSError, UnicodeDecodeError, PolicyError) as error:
        print(f"--policy {arguments.policy}: {error}", file=sys.stderr)
        sys.exit(2)
    variables = {LOG_FORMAT: "json"} if is_json(arguments.log_format) else {}
    if arguments.traces:
        try:
            variables[TRACES] = trace_receiver(arguments.traces)
        except ValueError as error:
            print(f"--traces: {error}", file=sys.stderr)
            sys.exit(2)
    options = OperatorOptions(
        tuple(arguments.namespace),
        arguments.lease_namespace or access.namespace,
        arguments.metrics_port,
        arguments.webhook_port,
        arguments.webhook_certificates,
        arguments.identity or _identity(),
        arguments.page_port,
        arguments.page_keys,
        arguments.runtime_image,
        policy,
        variables,
    )
    try:
        asyncio.run(Operator(access, options).run())
    except DependencyLost as loss:
        _log.error("%s: ending", loss)
        # Exit immediately: waiting for a task would continue work without a lease.
        os._exit(1)
    except CannotServe as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the flags; docs/operator.md explains them."""
    parser = argparse.ArgumentParser(prog="dsv4-operator", description=main.__doc__)
    parser.add_argument("--namespace", action="append", default=[], help="watch this namespace only; may be repeated")
    parser.add_argument("--lease-namespace", help="namespace of the lease (default: the operator's own)")
    parser.add_argument("--metrics-port", type=int, default=8080, help="for /metrics, /livez and /readyz")
    parser.add_argument("--webhook-port", type=int, help="for the admission webhook (default: there is none)")
    parser.add_argument("--webhook-certificates", type=Path, default=_CERTIFICATES, help="tls.crt and tls.key for it")
    parser.add_argument("--page-port", type=int, help="for the status page (default: there is none)")
    parser.add_argument("--page-keys", type=Path, default=_PAGE_KEYS, help="file with the keys of the page, one a line")
    parser.add_argument("--runtime-image", default="", help="image of members without spec.engine.image")
    parser.add_argument("--policy", type=Path, help="limits on the use of nodes (default: that of the chart)")
    parser.add_argument(
        "--kubeconfig", type=Path, help="default: the service account of the pod, or the kubeconfig of kubectl"
    )
    parser.add_argument(
        "--log-format", choices=LOG_FORMATS, help=f"also of members (default: ${LOG_FORMAT}, else text)"
    )
    parser.add_argument(
        "--traces",
        metavar="URL",
        default=os.environ.get(TRACES),
        help=f"receiver of OTLP over gRPC for the spans of gateways and vLLM (default: ${TRACES}, else there are none)",
    )
    parser.add_argument("--identity", help="unique identity of this operator (default: the name of the pod, or random)")
    return parser


_Server = ProbeServer | AdmissionServer | PageServer


class Operator:
    """One operator process."""

    def __init__(self, access: Access, options: OperatorOptions) -> None:
        self._access, self._options = access, options
        self._metrics = OperatorMetrics()
        # Renewals bypass the guard that checks the lease, and the connections of all other requests.
        self._plain = Client(access, on_answer=self._metrics.count_request)
        self._lease = Lease(self._plain, options.lease_namespace, LEASE_NAME, options.identity)
        self._kube = Client(access, guard=self._lease.check, on_answer=self._metrics.count_request)
        self._recorder = Recorder(self._kube, options.identity)
        self._queue: WorkQueue[DeploymentKey] = WorkQueue(
            self._reconcile,
            workers=_WORKERS,
            min_interval=_MIN_INTERVAL_SECONDS,
            longest=_LONGEST_BACKOFF_SECONDS,
            failed=self._failed,
        )
        self._pods = PodCache(self._kube, namespaces=options.namespaces, changed=self._pod_changed)
        self._owned = OwnedCache(self._kube, namespaces=options.namespaces, changed=self._changed)
        self._ray_clusters = (
            RayClusterCache(self._kube, namespaces=options.namespaces, changed=self._changed)
            if KUBERAY_BACKEND in options.policy.backends
            else None
        )
        self._nodes = NodeCache(self._kube, changed=self._node_changed)
        self._fleet = Fleet(self._manifests)
        given = registry.BackendDependencies(
            self._kube,
            self._pods,
            self._owned,
            options.runtime_image,
            options.policy,
            self._agents_changed,
            access.in_cluster,
            self._ray_clusters,
            options.variables,
            self._fleet.take,
            self._nodes,
        )
        self._backends = registry.Backends(given)
        self._deployments = Deployments(
            Dependencies(self._kube, self._backends.of, endpoints, self._record, failed=self._part_failed)
        )
        self._admission: AdmissionServer | None = None
        self._metrics.observe(
            self._deployments.observed,
            lambda: self._lease.holds,
            lambda: len(self._queue),
            lambda: self._admission.certificate_end if self._admission is not None else None,
            self._deployments.failing,
        )
        self._places: Sequence[str | None] = tuple(dict.fromkeys(options.namespaces)) or (None,)
        """Namespaces of the watched deployments; None: all."""
        self._readable: set[str | None] = set()
        """Those whose deployments could be listed at the start."""
        self._known: set[str | None] = set()
        """Those whose pods are known, so that their deployments are reconciled."""
        self._listed: tuple[float, list[Manifest]] | None = None
        """Monotonic time and result of the latest list for the status page."""
        self._waits_for: str | None = "starting"
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            Lost: the lease or the watch is gone.
            CannotServe: the port for probes and metrics is taken, or the webhook cannot be served.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        servers = await self._serve()
        work = asyncio.create_task(self._work(), name="work")
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            _log.info("ending")
        finally:
            work.cancel()
            stopped.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
            await self._lease.release()
            await self._backends.close()
            await self._kube.close()
            await self._plain.close()
            for server in servers:
                await server.close()

    async def _serve(self) -> list[_Server]:
        """Start the probe and metrics server, and webhook and status page if there are any, also without the lease."""
        port, webhook = self._options.metrics_port, self._options.webhook_port
        probes = ProbeServer(
            port, live=self._liveness_problem, ready=self._readiness_problem, metrics=self._metrics.text
        )
        try:
            await probes.start()
        except OSError as error:
            raise CannotServe(f"--metrics-port {port}: {error.strerror or error}") from error
        servers: list[_Server] = [probes]
        if self._options.page_port is not None:
            servers.append(await self._serve_page(self._options.page_port))
        if webhook is None:
            return servers
        folder = self._options.webhook_certificates
        try:
            admission = AdmissionServer(webhook, folder, self._options.policy, self._options.runtime_image)
        except OSError as error:
            raise CannotServe(f"--webhook-certificates {folder}: {error.strerror or error}") from error
        try:
            await admission.start()
        except OSError as error:
            raise CannotServe(f"--webhook-port {webhook}: {error.strerror or error}") from error
        self._admission = admission
        return [*servers, admission]

    async def _serve_page(self, port: int) -> PageServer:
        keys = self._options.page_keys
        try:
            page = PageServer(port, keys, self._fleet.make)
        except ValueError as error:
            raise CannotServe(f"--page-keys {keys}: {error}") from error
        try:
            await page.start()
        except OSError as error:
            raise CannotServe(f"--page-port {port}: {error.strerror or error}") from error
        return page

    async def _manifests(self) -> Iterable[Manifest]:
        """Return the latest objects of all deployments: those of the watch, or listed while another process leads."""
        if self._lease.holds:
            return self._deployments.manifests()
        now = time.monotonic()
        if self._listed is None or now - self._listed[0] >= _STANDBY_LIST_SECONDS:
            found: list[Manifest] = []
            for place in self._places:
                # Of a namespace that is gone.
                with contextlib.suppress(Forbidden):
                    found += await self._plain.list(DSV4_DEPLOYMENTS, place)
            self._listed = now, found
        return self._listed[1]

    async def _follow(self, place: str | None) -> None:
        """Watch the deployments of one namespace from the first list of its pods on, until cancelled.

        Each namespace has a watch of its own: one that is deleted, with the operator's rights in it, ends no other.
        """
        await self._pods.listed(place)
        # The operator may not be allowed to watch nodes; owned objects that are not known are only read again.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CACHES_SECONDS):
                await self._nodes.synced()
                await self._owned.listed(place)
        if not self._known:
            # Objects that stay until the end: no collection of garbage looks at them again.
            gc.collect()
            gc.freeze()
        watch = DeploymentWatch(self._access, place, self._on_event)
        watch.start()
        self._known.add(place)
        if self._known >= self._readable:
            self._waits_for = None
        try:
            await asyncio.Event().wait()
        finally:
            await watch.close()

    async def _work(self) -> None:
        """Acquire the lease and run all tasks that need it."""
        self._waits_for = "the definition of DSV4Deployment"
        await self._definition()
        # A standby that waits for the lease is ready.
        self._waits_for = None
        await self._lease.acquire()
        _log.info("%s leads", self._lease.identity)
        self._waits_for = "the pods"
        ends = {
            asyncio.create_task(self._lease.keep()): "the lease",
            asyncio.create_task(self._pods.run()): "the watch of the pods",
            asyncio.create_task(self._owned.run()): "the watch of owned objects",
            asyncio.create_task(self._nodes.run()): "the watch of the nodes",
            asyncio.create_task(self._recorder.run()): "the events",
            asyncio.create_task(self._resync()): "the lists of the deployments",
        }
        if self._ray_clusters is not None:
            ends[asyncio.create_task(self._ray_clusters.run())] = "the watch of the RayClusters"
        ends |= {asyncio.create_task(self._follow(place)): "the watch of the deployments" for place in self._places}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            task = done.pop()
            raise DependencyLost(f"{ends[task]} ended") from task.exception()
        finally:
            await self._queue.close()
            await self._deployments.close()
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _definition(self) -> None:
        """Wait until the API server serves DSV4Deployment and this account may list them, in one namespace at least."""
        problems: dict[str | None, str] = {}
        while True:
            for place in self._places:
                try:
                    await self._kube.list(DSV4_DEPLOYMENTS, place)
                except KubeError as error:
                    if str(error) not in problems.values():
                        _log.warning("waiting for the API server and the definition of DSV4Deployment: %s", error)
                    problems[place] = str(error)
                else:
                    self._readable.add(place)
            if self._readable:
                break
            await asyncio.sleep(_DEFINITION_SECONDS)
        for place in problems.keys() - self._readable:
            remedy = "if the namespace is gone, remove it from --namespace (the chart's watchNamespaces)"
            _log.warning("%s: its deployments are supervised once they can be listed; %s", place, remedy)

    async def _resync(self) -> None:
        """List the deployments now and then, until cancelled."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            for place in tuple(self._known):
                try:
                    listing = await self._kube.listing(DSV4_DEPLOYMENTS, place)
                except KubeError as error:
                    _log.warning("the deployments cannot be listed: %s", error)
                    continue
                for key in self._deployments.handle_listing(listing, place):
                    self._queue.add(key)
                    self._check_orphans(key)

    def _on_event(self, manifest: Manifest, gone: bool) -> None:
        name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        before = self._deployments.uid(name)
        key = self._deployments.handle_event(manifest, gone)
        if key is not None:
            self._queue.add(key)
        if self._deployments.uid(name) != before:
            self._check_orphans(name)

    def _check_orphans(self, name: DeploymentKey) -> None:
        """Let go the pods of a deployment that is gone; they may have ended before it, without an event since."""
        if self._ray_clusters is not None:
            for key in self._pods.groups(*name):
                self._backends.orphaned(key, self._deployments.uid(name))

    def _pod_changed(self, key: PodKey) -> None:
        self._changed(key[:2])
        if self._ray_clusters is not None:
            self._backends.orphaned(key, self._deployments.uid(key[:2]))

    def _node_changed(self, node: str) -> None:
        for key in self._pods.deployments_on(node):
            self._changed(key)

    def _changed(self, key: DeploymentKey) -> None:
        if self._deployments.knows(key):
            self._queue.add(key)

    def _agents_changed(self, namespace: str, name: str) -> None:
        self._queue.add((namespace, name))

    def _record(self, about: Manifest, event: Event) -> None:
        self._metrics.count_event(event)
        self._recorder.record(about, event)

    async def _reconcile(self, key: DeploymentKey) -> float | None:
        with self._metrics.seconds.time():
            pause = await self._deployments.reconcile(key)
        self._metrics.reconciles.labels("ok").inc()
        return pause

    def _part_failed(self, _key: DeploymentKey, part: Part) -> None:
        self._metrics.failures.labels(part.name).inc()

    def _failed(self, key: DeploymentKey, error: Exception, pause: float) -> None:
        self._metrics.reconciles.labels("error").inc()
        unexpected = None if is_expected(error) or isinstance(error, StatusLost) else error
        said = str(error) or type(error).__name__
        _log.error("%s/%s: %s; again in %.1f s", *key, said, pause, exc_info=unexpected)

    def _liveness_problem(self) -> str | None:
        longest = self._queue.longest_call
        return f"a turn has taken {longest:.0f} s" if longest > _LONGEST_TURN_SECONDS else None

    def _readiness_problem(self) -> str | None:
        return f"waiting for {self._waits_for}" if self._waits_for is not None else None


def endpoints(deployment: DSV4Deployment) -> Endpoints:
    """Return the URLs of `deployment` for users inside the cluster."""
    name, namespace = deployment.metadata.name, deployment.metadata.namespace
    dashboard, _ = names.HEAD_PORTS["dashboard"]
    return Endpoints(
        f"http://{name}.{namespace}.svc:{names.GATEWAY_PORT}/v1",
        f"http://{names.head_name(name, 0)}.{namespace}.svc:{dashboard}",
    )


def _identity() -> str:
    """Return a unique name. A container that restarts in its pod keeps the name, because its predecessor has ended."""
    host = socket.gethostname()
    return host if (SERVICE_ACCOUNT / "token").exists() else f"{host}_{uuid.uuid4().hex[:8]}"


if __name__ == "__main__":
    main()
