"""The token keys of deployments, each in a Secret that goes with it; tokens of incarnations; and users' Secrets."""

from __future__ import annotations

import base64
import logging
import time

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.backends.base import BackendError
from dsv4_operator.backends.pods.ownership import OwnedObjects
from dsv4_operator.builders import member, names
from dsv4_operator.builders.names import Manifest
from dsv4_operator.kube import SECRETS, Kube, KubeError, KubeReader
from dsv4_runtime.contract.token import new_key, new_token

_log = logging.getLogger("dsv4")

_FRESH_SECONDS = 60.0
"""For which a Secret is believed to be there that was, where members are made."""


class TokenKeys:
    """The token keys of all deployments, remembered so that not every question to an agent costs a request."""

    def __init__(self, kube: Kube) -> None:
        self._kube: KubeReader = kube
        self._objects = OwnedObjects(kube)
        self._known: dict[tuple[str, str], tuple[str | None, str, float]] = {}
        """By namespace and name: uid of the deployment, key, and monotonic time at which the API server had it."""

    async def ensure(self, deployment: DSV4Deployment, seconds: float = _FRESH_SECONDS) -> str:
        """Return the key, which the API server had within the last `seconds`; made if it is gone.

        Raises:
            BackendError: see `_key_of`.
            KubeError: see `_key_of`.
        """
        metadata = deployment.metadata
        known = self._known.get((metadata.namespace, metadata.name))
        if known is not None and known[0] == metadata.uid and time.monotonic() - known[2] <= seconds:
            return known[1]
        # Of running agents the tokens were made with it: a Secret that somebody removed is made again as it was.
        earlier = known[1] if known is not None and known[0] == metadata.uid else None
        key = await self._key_of(deployment, earlier)
        self._known[metadata.namespace, metadata.name] = metadata.uid, key, time.monotonic()
        return key

    async def make_token(self, deployment: DSV4Deployment, group_index: int, incarnation: int) -> None:
        """Make the Secret with the token of a new incarnation, if no earlier try has made it.

        Raises:
            BackendError: see `_key_of`; or the Secret's name is somebody else's.
            KubeError: see `_key_of`; or the API server refused the Secret.
        """
        token = new_token(await self.ensure(deployment))
        await self._objects.create(member.token_secret(deployment, group_index, incarnation, token))

    async def of(self, deployment: DSV4Deployment) -> str | None:
        """Return the key for what agents are asked with, however old; None while it cannot be had."""
        metadata = deployment.metadata
        known = self._known.get((metadata.namespace, metadata.name))
        if known is not None and known[0] == metadata.uid:
            return known[1]
        try:
            return await self.ensure(deployment)
        except (BackendError, KubeError) as error:
            _log.warning("%s/%s: no token key for its agents: %s", metadata.namespace, metadata.name, error)
            return None

    async def _key_of(self, deployment: DSV4Deployment, earlier: str | None) -> str:
        """Return the token key of `deployment`; made if there is none, from `earlier` if that is known.

        Raises:
            BackendError: the Secret belongs to somebody else, or is being deleted.
            KubeError: the Secret cannot be read or made, or has no key.
        """
        # A deployment that never had a group has none, most likely.
        older = bool(deployment.status.groups)
        wanted = member.token_key_secret(deployment, earlier or "")
        known = await self._objects.find(wanted) if older or earlier is not None else None
        if known is None:
            key = earlier or (await self._key_before_uid(deployment) if older else None) or new_key()
            if await self._objects.create(member.token_key_secret(deployment, key)):
                return key
            known = await self._objects.find(wanted)
        found = _entry(known)
        if found is None:
            name = f"{deployment.metadata.namespace}/{wanted['metadata']['name']}"
            what = f"the Secret {name} has no entry {names.TOKEN_KEY_ENTRY}"
            raise KubeError(f"{what}; delete it, and it is made anew")
        return found

    async def _key_before_uid(self, deployment: DSV4Deployment) -> str | None:
        """Return the key in the Secret of the earlier name, with which the tokens of running agents were made."""
        metadata = deployment.metadata
        found = await self._kube.get(SECRETS, metadata.namespace, names.earlier_token_key_name(metadata.name))
        return _entry(found) if found is not None and names.belongs(found, metadata.uid) else None

    def release(self, namespace: str, name: str) -> None:
        """Drop what is remembered of one deployment."""
        self._known.pop((namespace, name), None)


async def require_secrets(kube: KubeReader, deployment: DSV4Deployment) -> None:
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


def _entry(secret: Manifest | None) -> str | None:
    """Return the token key in `secret`; None without one."""
    text = ((secret or {}).get("data") or {}).get(names.TOKEN_KEY_ENTRY)
    return None if text is None else base64.b64decode(text).decode().strip()
