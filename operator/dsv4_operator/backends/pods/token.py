"""The token of a deployment: made once, kept in a Secret that goes with the deployment."""

from __future__ import annotations

import base64
import secrets

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.builders import group, names, places
from dsv4_operator.kube import SECRETS, AlreadyExists, Kube, KubeError


async def token_of(kube: Kube, deployment: DSV4Deployment) -> str:
    """The token; made if there is none.

    Raises:
        KubeError: the Secret cannot be read or made, or has no token.
    """
    namespace, name = deployment.metadata.namespace, names.token_name(deployment.metadata.name)
    # A deployment that never had a group has none, most likely.
    known = await kube.get(SECRETS, namespace, name) if deployment.status.groups else None
    if known is None:
        # Ray asks for nothing but secrecy; 256 bits as text.
        token = secrets.token_hex(32)
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
