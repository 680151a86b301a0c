"""The limits of a deployment's gateways."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from dsv4_operator.api import DSV4Deployment
from dsv4_operator.planning.images.arguments import read_arguments
from dsv4_operator.planning.staged import secret_file
from dsv4_runtime.contract.gateway import GatewaySettings

_OTHER_CLIENT_BYTES = 128 * 2**20
"""Beside the bodies of requests that wait and one that arrives: connections, answers, streams that could go on."""


def gateway_settings(
    deployment: DSV4Deployment,
    *,
    drain_seconds: float,
    secrets_root: str,
    lame_duck_seconds: float = 5.0,
    service_url: str | None = None,
) -> GatewaySettings:
    """Return the settings of every gateway of `deployment`.

    Args:
        deployment: whose specification has the limits.
        drain_seconds: `spec.gateway.drain`, or less where the place has no more time.
        secrets_root: where the gateway finds what is named by a `secretKeyRef`.
        lame_duck_seconds: time from SIGTERM until it stops accepting; 0 where no endpoint has to be withdrawn.
        service_url: URL of the Service in front of all gateways; None: there is none.
    """
    spec = deployment.spec.gateway
    return GatewaySettings(
        served_names=(*deployment.served_names, *_adapters(deployment)),
        hold_timeout_seconds=spec.hold_timeout,
        max_held_requests=spec.max_held_requests,
        max_held_bytes=spec.max_held_bytes,
        max_client_bytes=spec.max_held_bytes + spec.max_body_bytes + _OTHER_CLIENT_BYTES,
        request_timeout_seconds=spec.request_timeout,
        max_body_bytes=spec.max_body_bytes,
        drain_seconds=drain_seconds,
        lame_duck_seconds=lame_duck_seconds,
        service_url=service_url,
        api_keys_file=secret_file(spec.api_keys.secret_key_ref if spec.api_keys else None, secrets_root),
    )


def _adapters(deployment: DSV4Deployment) -> Iterator[str]:
    """Yield the names of the adapters in `--lora-modules`, which are `NAME=PATH` or JSON with `name`."""
    for argument in read_arguments(deployment.spec.engine.extra_args):
        if argument.name.replace("_", "-") == "--lora-modules":
            for value in argument.values:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    yield str(json.loads(value)["name"]) if value.startswith("{") else value.partition("=")[0]
