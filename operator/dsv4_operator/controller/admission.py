"""The optional admission webhook: it refuses at `kubectl apply` everything that the reconciler refuses, with the same
message.

The webhook is a convenience, not a safeguard: the reconciler checks every object again. The webhook writes nothing and
has no data about the nodes, so findings that depend on nodes are warnings. Any client that reaches the port can send
requests that the API server would reject. The server therefore runs in its own thread with its own event loop, and
rejects large requests before parsing, because parsing holds the interpreter lock and would block the operator's loop.
Protocol: https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import logging
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from dsv4_operator.api import ClusterPolicy, DSV4Deployment, InvalidDeployment, Reason, Severity
from dsv4_operator.api.deployment import parse
from dsv4_operator.api.findings import joined
from dsv4_operator.api.policy import violations
from dsv4_operator.backends import registry
from dsv4_operator.kube import Manifest
from dsv4_operator.planning import PlanRefused, plan_group
from dsv4_operator.planning.catalog import machine
from dsv4_operator.planning.facts import Facts, catalog_facts
from dsv4_operator.planning.rules import findings

_log = logging.getLogger("dsv4")

_DEFAULT_POLICY = ClusterPolicy()
_API_VERSION = "admission.k8s.io/v1"
_MADE_LETTERS = 5
_DER_VERSION, _DER_GENERALIZED_TIME = 0xA0, 0x18
_ANY_MEMORY = 2**50
"""Assumed memory of a machine without an accelerator, which the catalog does not list."""


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """Verdict on one manifest."""

    refusal: str | None = None
    warnings: tuple[str, ...] = ()


def judge(
    new: Mapping[str, Any],
    old: Mapping[str, Any] | None = None,
    policy: ClusterPolicy = _DEFAULT_POLICY,
    runtime_image: str = "",
) -> AdmissionResult:
    """Return the refusal or warnings of the reconciler for `new`, as far as they do not depend on nodes.

    Args:
        new: the manifest, as the API server has it after defaulting.
        old: the replaced manifest. A change of labels and annotations alone, or one that only stops the deployment, is
            never refused, even if the specification is older than a rule.
        policy: limits on the use of nodes.
        runtime_image: the operator's image, which all deployments may run.
    """
    if old is not None and (old.get("spec") == new.get("spec") or _only_stops(new, old)):
        return AdmissionResult()
    try:
        deployment = parse(_judged(new))
        registry.check(deployment)
    except InvalidDeployment as error:
        return AdmissionResult(str(error))
    forbidden = violations(deployment, policy, runtime_image)
    if deployment.spec.suspend or not deployment.spec.replicas:
        # Nothing is planned, but the policy applies: `kubectl scale` would start the deployment without another
        # check.
        return AdmissionResult(joined(forbidden) or None)
    facts = replace(_usual_machines(deployment), forbidden=forbidden)
    try:
        plan_group(deployment, facts, group=0, incarnation=1)
        found = findings(deployment, facts)
    except PlanRefused as refused:
        if refused.reason is not Reason.MEMORY_SHORT:
            return AdmissionResult(refused.message)
        return AdmissionResult(warnings=(f"on {facts.nodes[0].machine}: {refused.message}",))
    return AdmissionResult(warnings=tuple(str(finding) for finding in found if finding.severity is Severity.WARN))


def review(document: Manifest, policy: ClusterPolicy = _DEFAULT_POLICY, runtime_image: str = "") -> Manifest:
    """Return the answer to an AdmissionReview.

    Raises:
        KeyError: `document` is no AdmissionReview.
    """
    request = document["request"]
    verdict = judge(request["object"], request.get("oldObject"), policy, runtime_image)
    answer: Manifest = {"uid": request["uid"], "allowed": verdict.refusal is None}
    if verdict.refusal is not None:
        answer["status"] = {"code": 422, "reason": "Invalid", "message": verdict.refusal}
    if verdict.warnings:
        answer["warnings"] = list(verdict.warnings)
    return {"apiVersion": _API_VERSION, "kind": "AdmissionReview", "response": answer}


def _only_stops(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    specs = [{"suspend": False, "replicas": 1, **(manifest.get("spec") or {})} for manifest in (new, old)]
    stopped = specs[0]["suspend"] is True or specs[0]["replicas"] == 0
    return stopped and {**specs[0], "suspend": False, "replicas": 1} == {**specs[1], "suspend": False, "replicas": 1}


def _judged(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of the manifest that the verdict depends on, with a sample name for `generateName`."""
    metadata = manifest["metadata"]
    judged = {key: value for key, value in manifest.items() if key != "status"}
    if "name" in metadata or "generateName" not in metadata:
        return judged
    return {**judged, "metadata": {**metadata, "name": metadata["generateName"] + "0" * _MADE_LETTERS}}


def _usual_machines(deployment: DSV4Deployment) -> Facts:
    kind = machine(deployment.spec.topology.hardware)
    if not kind.sm:
        kind = replace(kind, memory_bytes=_ANY_MEMORY)
    # The verdict does not depend on paths.
    return catalog_facts(deployment, kind, state_root="/", weights_root="/")


PATH = "/validate"
_LOOK_SECONDS = 30.0
_STOP_SECONDS = 5.0
_CLOSE_SECONDS = 1.0

_MOST_BYTES = 4 * 2**20
"""Bytes of a review: two objects of 1.5 MiB, the limit of etcd, and 1 MiB for the rest."""
_MOST_VALUES = 100_000
"""Commas and colons in a review: parsing them blocks all threads for 15 ms. Deployments have a tenth at most."""
_REVIEWS = 4
_OPEN = 16
"""Requests that are read, queued or processed: 64 MiB at most."""
_CONNECTIONS = 256
_HANDSHAKE_SECONDS = 5.0
_SECONDS = 4.0
"""Time from a request's head to its answer: the API server waits for 5 s."""


class _Server(web.Server):
    """Server that closes connections beyond a limit: each uses a descriptor, which the operator needs too."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > _CONNECTIONS:
            transport.abort()


def certificate_end(file: Path) -> float | None:
    """Return the Unix time at which the first certificate in a PEM file expires; None if it cannot be decoded.

    RFC 5280: a certificate begins with `[0]` version, serial number, algorithm, issuer and validity. `ssl` decodes only
    certificates of peers.
    """
    try:
        _, _, rest = file.read_text().partition("-----BEGIN CERTIFICATE-----")
        body, _, _ = rest.partition("-----END CERTIFICATE-----")
        data = base64.b64decode("".join(body.split()))
        fields = _der(_der(_der(data)[0][1])[0][1])
        validity = _der([content for tag, content in fields if tag != _DER_VERSION][3])
        tag, text = validity[1]
        # UTCTime has two digits of the year, from 1950 on.
        century = "" if tag == _DER_GENERALIZED_TIME else "19" if text >= b"50" else "20"
        return datetime.strptime(century + text.decode(), "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except (IndexError, ValueError):
        return None


def _der(data: bytes) -> list[tuple[int, bytes]]:
    """Return tag and content of each value in a sequence of DER values."""
    found, at = [], 0
    while at < len(data):
        tag, size = data[at], data[at + 1]
        at += 2
        if size & 0x80:
            more = size & 0x7F
            size = int.from_bytes(data[at : at + more])
            at += more
        found.append((tag, data[at : at + size]))
        at += size
    return found


class AdmissionServer:
    """Answers AdmissionReviews over TLS. A certificate that is renewed in place is loaded within half a minute."""

    def __init__(self, port: int, certificates: Path, policy: ClusterPolicy, runtime_image: str) -> None:
        """Args:
        port: port to listen on, on all addresses.
        certificates: directory with `tls.crt` and `tls.key`, as a Secret of type `kubernetes.io/tls` is mounted.
        policy: limits on the use of nodes.
        runtime_image: the operator's image.

        Raises:
            OSError, ssl.SSLError: the files cannot be read.
        """
        self._port, self._policy, self._runtime_image = port, policy, runtime_image
        self._files = certificates / "tls.crt", certificates / "tls.key"
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.certificate_end: float | None = None
        """Unix time at which the loaded certificate expires."""
        self._stamp = self._look()
        self._load()
        self.open = 0
        self._reviewers = concurrent.futures.ThreadPoolExecutor(_REVIEWS, "review")
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stop: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        self._thread.start()
        await asyncio.wrap_future(self._started)

    async def close(self) -> None:
        if not self._stop.done():
            self._stop.set_result(None)
        await asyncio.to_thread(self._thread.join, _STOP_SECONDS)

    def renew(self) -> None:
        """Load a renewed certificate for new connections."""
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._load()
                self._stamp = stamp
                _log.info("the webhook's certificate was renewed")
        except (OSError, ssl.SSLError) as error:
            _log.warning("the webhook's certificate cannot be read, the last one stays: %s", error)

    def _load(self) -> None:
        self._context.load_cert_chain(*self._files)
        self.certificate_end = certificate_end(self._files[0])

    def _look(self) -> tuple[int, ...]:
        return tuple(file.stat().st_mtime_ns for file in self._files)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if self._started.done():
                _log.exception("the webhook ended")
            else:
                self._started.set_exception(error)
        finally:
            self._reviewers.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        server = _Server(self._answer, access_log=None)
        listening = await asyncio.get_running_loop().create_server(
            server, None, self._port, ssl=self._context, ssl_handshake_timeout=_HANDSHAKE_SECONDS
        )
        try:
            self._started.set_result(None)
            stop = asyncio.wrap_future(self._stop)
            while not stop.done():
                await asyncio.wait({stop}, timeout=_LOOK_SECONDS)
                self.renew()
        finally:
            listening.close()
            await server.shutdown(_CLOSE_SECONDS)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        if (request.method, request.path) != ("POST", PATH):
            return web.Response(status=404, text=f"POST {PATH} alone is served\n")
        if self.open >= _OPEN:
            return _busy(f"{_OPEN} reviews are open")
        self.open += 1
        try:
            async with asyncio.timeout(_SECONDS):
                return await self._reviewed(request)
        except TimeoutError:
            return _busy(f"not done within {_SECONDS:.0f} s")
        finally:
            self.open -= 1

    async def _reviewed(self, request: web.BaseRequest) -> web.Response:
        body = bytearray()
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > _MOST_BYTES:
                return _too_large(f"{_MOST_BYTES} bytes")
        if body.count(b",") + body.count(b":") > _MOST_VALUES:
            return _too_large(f"{_MOST_VALUES} commas and colons")
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._reviewers, self._review, bytes(body))
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return web.Response(status=400, text=f"not an AdmissionReview: {error!r}\n")
        return web.Response(body=answer, content_type="application/json")

    def _review(self, body: bytes) -> bytes:
        return orjson.dumps(review(orjson.loads(body), self._policy, self._runtime_image))


def _busy(why: str) -> web.Response:
    return web.Response(status=503, headers={"Retry-After": "1"}, text=f"{why}; try again\n")


def _too_large(limit: str) -> web.Response:
    return web.Response(status=413, text=f"a review has at most {limit}; no deployment needs more\n")
