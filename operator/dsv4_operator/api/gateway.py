"""`spec.gateway`: what the front of every group may hold, and for how long."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dsv4_operator.api.cluster import SecretKeyRef
from dsv4_operator.api.parts import Count, SpecPart
from dsv4_operator.api.values import Between, BoundedDuration, BoundedQuantity, Duration, Quantity


class ApiKeysSource(SpecPart):
    """Source of the keys of clients."""

    secret_key_ref: SecretKeyRef
    """Keys, one a line."""


class GatewaySpec(SpecPart):
    """The HTTP front of every group: it keeps requests while the engine is away."""

    hold_timeout: Duration = 600.0
    """Time for which a request waits for an engine that is away; `0s`: not at all."""
    max_held_requests: Annotated[Count, Field(ge=0, le=100_000)] = 1024
    """Requests that may wait at the same time; further ones are refused with 503."""
    max_held_bytes: Quantity = 256 * 2**20
    """Bodies of the requests that wait, together; further ones are refused with 503."""
    request_timeout: Annotated[BoundedDuration, Between("1ms", "8760h", "1h")] = 3600.0
    """From the arrival of a request to the last byte of its answer. A client may ask for less: `X-Request-Timeout`."""
    max_body_bytes: Annotated[BoundedQuantity, Between("1Ki", "1Gi")] = 64 * 2**20
    """The longest body of a request."""
    api_keys: ApiKeysSource | None = None
    """Keys that clients must show one of. Default: anybody may ask."""
    drain: Duration = 300.0
    """Longest time for open requests after the termination of a gateway starts, also for those that wait for an engine.
    15 s with `dsv4 up`, and where no other gateway of the deployment answers."""
