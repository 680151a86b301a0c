"""The canary: one token completed by an engine, on the way that clients' requests take."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import time

from dsv4_runtime.contract.gateway import CanaryReport
from dsv4_runtime.contract.token import canary_token
from dsv4_runtime.gateway.errors import EngineLostError
from dsv4_runtime.gateway.groups import Groups, RoutedGroup
from dsv4_runtime.gateway.http1 import BrokenMessageError, raw
from dsv4_runtime.gateway.request import Request
from dsv4_runtime.gateway.route import TokenKeyError
from dsv4_runtime.gateway.upstream import UnreachableError, Upstream

SECONDS = 10.0
"""Time that the completion may take."""
SHARED_SECONDS = 2.0
_MOST_BYTES = 2**20


class Canary:
    """Asks the group that the next request would go to for one token."""

    def __init__(self, groups: Groups, upstream: Upstream, model: str) -> None:
        """Args:
        groups: has the routes and the engines.
        upstream: the connections that clients' requests use.
        model: name that is asked for.
        """
        self._groups, self._upstream = groups, upstream
        self._body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0.0}).encode()
        self._name = socket.gethostname()

    def refusal(self, request: Request) -> CanaryReport | None:
        """Return the answer to a request without the token that opens the canary; None: it has the token."""
        try:
            wanted = canary_token(self._groups.routes.token_key())
        except TokenKeyError as error:
            return self._failed(f"wrong canary token: this gateway has none to compare it with: {error}")
        scheme, _, given = request.header(b"authorization").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), wanted.encode()):
            return None
        return self._failed("wrong canary token: this gateway has another token key, or the request has no token")

    async def check(self) -> CanaryReport:
        """Return whether an engine completes one token now; does not wait for an engine that is away."""
        found = self._groups.pick()
        if found is None:
            why = self._groups.refusal or self._groups.given_up or f"the state is {self._groups.state}"
            return self._failed(f"no healthy engine: {why}")
        group, life = found
        begun = time.monotonic()
        reason: str | None
        try:
            async with asyncio.timeout(SECONDS), life.attempt("canary"):
                reason = await self._complete(group)
        except TimeoutError:
            # Long answers may keep the next one waiting. They prove as well that requests are answered.
            answers = self._upstream.last_body(group.api) > begun
            reason = None if answers else f"no answer within {SECONDS:g} s"
        except (EngineLostError, UnreachableError, BrokenMessageError) as error:
            reason = str(error)
        return CanaryReport(
            ok=reason is None,
            reason=_line(reason or ""),
            group=group.index,
            generation=f"{life.identity[0]}-g{life.identity[1]}",
            seconds=round(time.monotonic() - begun, 4),
            gateway=self._name,
        )

    async def _complete(self, group: RoutedGroup) -> str | None:
        """Return what is wrong with the answer; None: nothing."""
        headers = [(b"Content-Type", b"application/json"), *raw(group.auth)]
        async with self._upstream.ask(group.api, "POST", "/v1/completions", headers, (self._body,)) as answer:
            body = b""
            while (part := await answer.part()) and len(body) < _MOST_BYTES:
                body += part
        text = body[:200].decode(errors="replace")
        if answer.status != 200:
            return f"vLLM answered {answer.status}: {text}"
        try:
            choices = json.loads(body)["choices"]
        except (ValueError, TypeError, KeyError):
            choices = None
        return None if isinstance(choices, list) and choices else f"vLLM's answer has no choice: {text}"

    def _failed(self, reason: str) -> CanaryReport:
        return CanaryReport(ok=False, reason=_line(reason), gateway=self._name)


def _line(text: str) -> str:
    return " ".join(text.split())[:500]
