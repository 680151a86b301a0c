"""The request that continues a stream, with what only the next engine can tell."""

from __future__ import annotations

import json
from typing import Any

from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.continuation import Pieces, Transcript
from dsv4_runtime.gateway.errors import RefusedError
from dsv4_runtime.gateway.groups import RoutedGroup
from dsv4_runtime.gateway.http1 import raw
from dsv4_runtime.gateway.upstream import Upstream


class Resumption:
    """Makes such requests."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def request(self, group: RoutedGroup, transcript: Transcript) -> tuple[str, Pieces]:
        """Return path and body of the request that continues the stream at `group`.

        Raises:
            RefusedError: it cannot be continued exactly.
        """
        sent = transcript.request()
        model = sent.get("model")
        context = await self._context(group, model) if transcript.limit(sent) is None else None
        for tokens, loose in transcript.alignments():
            if not transcript.loose_text or (loose and await self._text(group, model, loose) == transcript.loose_text):
                try:
                    return transcript.cut(sent, tokens, context)
                except ValueError as error:
                    raise RefusedError(errors.lost(f"the stream cannot be continued: {error}")) from error
        message = "the stream cannot be continued: the tokens behind its last characters are not certain"
        raise RefusedError(errors.lost(message))

    async def _text(self, group: RoutedGroup, model: object, tokens: list[int]) -> str | None:
        asked = json.dumps({"model": model, "tokens": tokens}).encode()
        found = await self._ask(group, "POST", "/detokenize", asked)
        return None if found is None else str(found.get("prompt"))

    async def _context(self, group: RoutedGroup, model: object) -> int | None:
        """Return the tokens that prompt and answer may have together."""
        found = await self._ask(group, "GET", "/v1/models")
        cards = (found or {}).get("data", [])
        return next((card.get("max_model_len") for card in cards if model in (None, card["id"])), None)

    async def _ask(self, group: RoutedGroup, method: str, path: str, body: bytes = b"") -> dict[str, Any] | None:
        """Ask a question of the gateway's own; return None if vLLM does not answer it."""
        headers = [(b"Content-Type", b"application/json"), *raw(group.auth)]
        async with self._upstream.ask(group.api, method, path, headers, (body,)) as answer:
            text = await answer.read()
        try:
            found = json.loads(text) if answer.status == 200 else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None
