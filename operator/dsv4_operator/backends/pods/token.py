"""Secrets: the tokens of deployments, made once, each in one that goes with its deployment; and those of users."""

from __future__ import annotations

import base64
import logging
import secrets
import time

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.base import BackendError
from dsv4_operator.builders import group, names, places
from dsv4_operator.kube import SECRETS, AlreadyExists, Kube, KubeError

_log = logging.getLogger("dsv4")

_FRESH_SECONDS = 60.0
"""For which a Secret is believed to be there that was, where members are made."""


class Tokens:
    """The tokens of all deployments, remembered so that not every question to an agent costs a request."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._known: dict[tuple[str, str], tuple[str | None, str, float]] = {}
        """By namespace and name: uid of the deployment, token, and monotonic time at which the API server had it."""

    async def ensure(self, deployment: DSV4Deployment, seconds: float = _FRESH_SECONDS) -> str:
        """Return the token, which the API server had within the last `seconds`; made if it is gone.

        Raises:
            KubeError: see `token_of`.
        """
        metadata = deployment.metadata
        known = self._known.get((metadata.namespace, metadata.name))
        if known is not None and known[0] == metadata.uid and time.monotonic() - known[2] <= seconds:
            return known[1]
        # Running agents know the token that was: a Secret that somebody removed is made again with it.
        earlier = known[1] if known is not None and known[0] == metadata.uid else None
        token = await token_of(self._kube, deployment, earlier)
        self._known[metadata.namespace, metadata.name] = metadata.uid, token, time.monotonic()
        return token

    async def of(self, deployment: DSV4Deployment) -> str | None:
        """Return the token that agents are asked with, however old; None while it cannot be had."""
        metadata = deployment.metadata
        known = self._known.get((metadata.namespace, metadata.name))
        if known is not None and known[0] == metadata.uid:
            return known[1]
        try:
            return await self.ensure(deployment)
        except KubeError as error:
            _log.warning("%s/%s: no token for its agents: %s", metadata.namespace, metadata.name, error)
            return None

    def release(self, namespace: str, name: str) -> None:
        """Drop what is remembered of one deployment."""
        self._known.pop((namespace, name), None)


async def require_secrets(kube: Kube, deployment: DSV4Deployment) -> None:
    """See that what `deployment` names by a `secretKeyRef` is there: without it, its pods would wait and not say why.

    Raises:
        BackendError: it is not; the text names the field, the Secret and the remedy.
        KubeError: it cannot be read.
    """
    namespace, gateway = deployment.metadata.namespace, deployment.spec.gateway
    source = deployment.spec.model.source.secret_key_ref
    keys = gateway.api_keys.secret_key_ref if gateway.api_keys is not None else None
    for field, ref in (("spec.model.source", source), ("spec.gateway.apiKeys", keys)):
        if ref is None:
            continue
        found = await kube.get(SECRETS, namespace, ref.name)
        if not ((found or {}).get("data") or {}).get(ref.key):
            what = "has no entry" if found is not None else "is not there, which should have"
            raise BackendError(
                f"{field}.secretKeyRef: the Secret {namespace}/{ref.name} {what} {ref.key}; make it, for example "
                f"kubectl create secret generic {ref.name} -n {namespace} --from-file={ref.key}=FILE"
            )


async def token_of(kube: Kube, deployment: DSV4Deployment, earlier: str | None = None) -> str:
    """Return the token of `deployment`; made if there is none, from `earlier` if that is known.

    Raises:
        KubeError: the Secret cannot be read or made, or has no token.
    """
    namespace, name = deployment.metadata.namespace, names.token_name(deployment.metadata.name)
    # A deployment that never had a group has none, most likely.
    known = await kube.get(SECRETS, namespace, name) if deployment.status.groups or earlier is not None else None
    if known is None:
        # Ray asks for nothing but secrecy; 256 bits as text.
        token = earlier or secrets.token_hex(32)
        try:
            await kube.create(group.token_secret(deployment, token))
        except AlreadyExists:
            known = await kube.get(SECRETS, namespace, name)
        else:
            return token
    data = (known or {}).get("data") or {}
    if places.TOKEN_KEY not in data:
        what = f"the Secret {namespace}/{name} has no entry {places.TOKEN_KEY}"
        raise KubeError(f"{what}; delete it, and it is made anew")
    return base64.b64decode(data[places.TOKEN_KEY]).decode().strip()
