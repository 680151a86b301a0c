"""Continuation of a stream whose engine died: which streams, from which token, with which request.

Rule (docs/gateway.md): a stream is continued only if the next token depends solely on the previous tokens and on
request fields that are sent again, and if the delivered text is exactly the text of those tokens. Only `Resumption`
performs I/O.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from pydantic_core import from_json, to_json

from dsv4_runtime.gateway import errors
from dsv4_runtime.gateway.errors import RefusedError
from dsv4_runtime.gateway.http_client import Upstream, encode_headers
from dsv4_runtime.gateway.routing import RoutedGroup
from dsv4_runtime.util import sse


def is_error_event(event: bytes, data: bytes) -> bool:
    """Return whether the event reports a failed stream, on any path. `data` is its payload."""
    return data[:9] == b'{"error":' or sse.name(event) in _ERRORS


TERMINATED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Paths whose streams have a final event."""
_ERRORS = frozenset({b"error", b"response.failed"})
_LAST_NAMES = _ERRORS | {b"message_stop", b"response.completed", b"response.incomplete"}


def is_final_event(event: bytes, data: bytes) -> bool:
    """Return whether the event may end a stream of a path in `TERMINATED_PATHS`. `data` is its payload."""
    return data == b"[DONE]" or sse.name(event) in _LAST_NAMES


Pieces = tuple[bytes | bytearray | memoryview, ...]
"""Parts of a request's body, in order."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# Evaluated per token from the previous tokens only; sent again unchanged.
_SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids"}
    | {"stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"}
    | {"model", "user", "priority", "cache_salt", "session_id", "stream", "stream_options", "stream_interval"}
)
# Without effect on the tokens; not sent again.
_PASSED_OVER = frozenset({"metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "request_id"})
# Replaced by the remaining length.
_LENGTH = {
    COMPLETIONS: frozenset({"max_tokens", "min_tokens"}),
    CHAT: frozenset({"max_tokens", "max_completion_tokens", "min_tokens"}),
}
# Part of the prompt, whose tokens are known by then.
_PROMPT = {
    COMPLETIONS: frozenset({"prompt", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"}),
    CHAT: frozenset(
        {"messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "documents"}
        | {"chat_template", "chat_template_kwargs", "reasoning_effort", "truncate_prompt_tokens", "truncation_side"}
    ),
}
# Without effect at exactly these values (null is always neutral).
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "stop": ([], ""),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "include_reasoning": (True,),
    "return_token_ids": (True, False),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
}

_IDS = re.compile(rb'"((?:prompt_)?token_ids)":\[[0-9,]*\]')
_PROMPT_IDS = b'"prompt_token_ids":['
_MAX_CHUNK = 2**19
"""Maximum bytes of a chunk parsed at once."""
# Bytes of a character minus one: tokens whose text the engine may hold back until the character is complete.
_HELD_BACK = 3


class _List(Enum):
    """Position in one engine's stream relative to the list of prompt tokens."""

    COMING = auto()
    TAKEN = auto()
    DROPPED = auto()
    """In the list of a continuing engine, which also contains tokens of the response."""
    OVER = auto()


def _null(found: re.Match[bytes]) -> bytes:
    return b'"%b":null' % found[1]


def obstacle(path: str, body: Mapping[str, Any]) -> str | None:
    """Return why a stream with the parsed request `body` could not be continued, else None."""
    if path not in _PROMPT:
        return f"streams of {path} are not continued"
    known = _SAMPLING | _PASSED_OVER | _PROMPT[path]
    for field, value in body.items():
        if field in _LENGTH[path]:
            # Depending on the vLLM version, null means no limit or 16 for completions.
            if type(value) is not int and not (value is None and (path, field) != (COMPLETIONS, "max_tokens")):
                return f"{field} is not a whole number"
            continue
        if value is None or field in known:
            continue
        if field == "seed":
            # The seed determines the draws in sequence; greedy sampling draws nothing.
            if body.get("temperature") == 0:
                continue
            return "seed makes the draws depend on how many there were"
        if not any(_same(value, neutral) for neutral in _NEUTRAL.get(field, ())):
            return f"{field} makes more than the tokens so far matter"
    if path == COMPLETIONS and not _one_prompt(body.get("prompt")):
        return "prompt has more than one prompt"
    if path == CHAT:
        messages = body.get("messages") or []
        # vLLM refuses any other type.
        if not isinstance(messages, list) or not all(map(_plain, messages)):
            return "messages has content that is not text"
    return None


def _same(value: object, neutral: object) -> bool:
    # In Python False == 0, but `logprobs: 0` and `logprobs: false` differ.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _one_prompt(prompt: object) -> bool:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
        return isinstance(prompt, str) or type(prompt) is int
    return isinstance(prompt, str) or (isinstance(prompt, list) and set(map(type, prompt)) <= {int})


def _plain(message: object) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def with_token_ids(raw: bytes | bytearray, body: Mapping[str, Any]) -> Pieces:
    """Return the request with `return_token_ids`, in parts; all other bytes are unchanged."""
    if body.get("return_token_ids"):
        return (raw,)
    if "return_token_ids" in body:
        return (to_json({**body, "return_token_ids": True}),)
    start = raw.index(b"{") + 1
    return raw[:start], b'"return_token_ids":true' + (b"," if body else b""), memoryview(raw)[start:]


class Transcript:
    """State of one stream as delivered to its client, across all engines."""

    def __init__(self, path: str, raw: bytes | bytearray, body: Mapping[str, Any]) -> None:
        """Args:
        path: `/v1/completions` or `/v1/chat/completions`.
        raw: the request as sent by the client.
        body: the parsed request, for which `obstacle` is None. Not stored: it takes many times the memory of `raw`.
        """
        self._path, self._raw = path, raw
        self._wants_ids = bool(body.get("return_token_ids"))
        self._prompt: list[bytes] = []
        """Prompt tokens as sent by the engine, comma-separated numbers in parts; empty: unknown."""
        self._prompt_tokens = self._prompt_bytes = 0
        self._list = _List.COMING
        self._border = b""
        self._tokens: array[int] = array("i")
        self._settled = 0
        """Tokens whose text is completely delivered."""
        self._text = ""
        """Delivered text beyond the settled tokens."""
        self._frame: dict[str, Any] = {}
        """id, object, created and model of the first chunk."""
        self._base = 0
        """Tokens of earlier engines; the present one counts from there."""
        self._continuing = False
        """Whether the present engine is not the first: its chunks get the first one's frame."""
        self._chat = path == CHAT
        """Whether the present engine sends chat chunks."""
        self._usage_given = False
        self.finished = False
        """Whether the chunk with the finish reason was delivered."""
        self.obstacle: str | None = None
        """Property of the stream that prevents its continuation."""

    def strip(self, data: bytes) -> bytes:
        """Remove the list of prompt tokens from bytes of the stream, and store it unparsed.

        The cost is linear in the bytes, also for a million tokens. Generated text cannot contain the name of the list,
        because its quotes are escaped. Bytes that may begin the name are held back until the next part.
        """
        if self._list is _List.OVER or self._wants_ids:
            return data
        kept = b""
        if self._list is _List.COMING:
            data, self._border = self._border + data, b""
            at = data.find(_PROMPT_IDS)
            if at < 0:
                sizes = range(len(_PROMPT_IDS) - 1, 0, -1)
                begun = len(data) - next((size for size in sizes if data.endswith(_PROMPT_IDS[:size])), 0)
                self._border = data[begun:]
                return data[:begun]
            at += len(_PROMPT_IDS)
            kept, data = data[:at], data[at:]
            self._list = _List.TAKEN if not self._prompt else _List.DROPPED
        ids, end, rest = data.partition(b"]")
        if self._list is _List.TAKEN:
            if ids.translate(None, b"0123456789,"):
                self.obstacle = "the stream has a prompt of an unknown form"
            elif ids:
                self._keep_prompt(ids)
            self._prompt_tokens += bool(end and self._prompt)
        if end:
            self._list = _List.OVER
        return kept + end + rest

    def _keep_prompt(self, ids: bytes) -> None:
        self._prompt.append(ids)
        self._prompt_tokens += ids.count(b",")
        self._prompt_bytes += len(ids)

    def take(self, event: bytes, data: bytes) -> bytes:
        """Record a delivered chunk (`data` is the event's payload); return the bytes for the client, possibly none.

        Chunks of an unknown form are forwarded, and the stream cannot be continued.
        """
        if len(data) > _MAX_CHUNK:
            self.obstacle = f"the stream has a chunk of more than {_MAX_CHUNK >> 10} KiB"
            return event
        try:
            chunk = from_json(data)
            choices = chunk["choices"]
            if choices and not self._note(chunk, choices[0]):
                return b""
            self._usage_given = self._usage_given or not choices
            if not self._frame:
                self._frame = {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}
            if self._continuing:
                return b"data: " + _dump(self._as_own(chunk)) + b"\n\n"
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
            self.obstacle = "the stream has a chunk of an unknown form"
            return event
        return event if self._wants_ids else _IDS.sub(_null, event)

    def _note(self, chunk: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Record a chunk; return whether it is for the client, who may not have requested token ids."""
        if not self._prompt:
            found = array("i", choice.get("prompt_token_ids") or chunk.get("prompt_token_ids") or ())
            if found:
                self._keep_prompt(b",".join(b"%d" % token for token in found))
                self._prompt_tokens += 1
        delta = choice["delta"] if self._chat else {"content": choice["text"]}
        if not delta.keys() <= {"role", "content"}:
            self.obstacle = "the stream has more than plain text (reasoning or tool calls)"
        if self._continuing and "role" in delta:
            return False
        tokens, text = choice.get("token_ids") or (), delta.get("content") or ""
        if self.obstacle is None:
            self._tokens.extend(tokens)
        if len(tokens) == 1 and text:
            # The engine emits text up to a whole character, so no text of this token is pending.
            self._settled, self._text = len(self._tokens), ""
        else:
            self._text += text
        if choice.get("finish_reason") is not None:
            self.finished = True
            return True
        # The parser produced no text for the token: without ids there would be no chunk.
        return bool(delta) or self._wants_ids or not tokens

    def _as_own(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Return a chunk of a later engine in the frame of the continued stream."""
        own = {**chunk, **self._frame, "choices": [self._as_own_choice(choice) for choice in chunk["choices"]]}
        if usage := chunk.get("usage"):
            prompt, completion = self._prompt_tokens, self._base + usage["completion_tokens"]
            count = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
            own["usage"] = {**usage, **count}
        return own

    def _as_own_choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        ids = choice.get("token_ids") if self._wants_ids else None
        if self._path == COMPLETIONS:
            return {**choice, "prompt_token_ids": None, "token_ids": ids}
        if self._chat:
            return {**choice, "token_ids": ids}
        own = {"index": 0, "delta": {"content": choice["text"]}, "logprobs": None}
        own["finish_reason"] = choice.get("finish_reason")
        if own["finish_reason"] is not None:
            own["stop_reason"] = choice.get("stop_reason")
        return {**own, "token_ids": ids}

    def alignments(self) -> list[tuple[int, list[int]]]:
        """Return the possible cuts, best first: number of tokens kept, and tokens whose text must equal `loose_text`.

        Cuts without tokens need no check. A chunk of several tokens does not determine which of them its text belongs
        to.
        """
        end, start = len(self._tokens), self._settled
        if not self._text:
            # Later tokens have no delivered text; the engine generates them again.
            cuts = [start] if not self._wants_ids else [end] * (start == end)
            return [(cut, []) for cut in cuts]
        least = end if self._wants_ids else max(start, end - _HELD_BACK)
        return [(cut, list(self._tokens[start:cut])) for cut in range(end, least - 1, -1)]

    @property
    def size(self) -> int:
        """Return the bytes of the stored tokens."""
        return self._tokens.itemsize * len(self._tokens) + self._prompt_bytes

    def request(self) -> dict[str, Any]:
        return dict(from_json(self._raw))

    def limit(self, body: Mapping[str, Any]) -> int | None:
        """Return the requested token limit; None: the rest of the model's context.

        `body` is the result of `request()`, as for `cut`.
        """
        if self._path == COMPLETIONS:
            return int(body.get("max_tokens", 16))
        limit = body.get("max_completion_tokens")
        return body.get("max_tokens") if limit is None else int(limit)

    @property
    def loose_text(self) -> str:
        """Return the delivered text that belongs to no settled token."""
        return self._text

    def cut(self, sent: Mapping[str, Any], tokens: int, context: int | None) -> tuple[str, Pieces]:
        """Keep `tokens` tokens; return path and body of the request that continues after them.

        Args:
            sent: the client's request.
            tokens: number of tokens from `alignments()`.
            context: maximum tokens of prompt and response, required where `limit` is None; None: unknown.

        Raises:
            ValueError: the stream cannot be continued; the message contains the reason.
        """
        del self._tokens[tokens:]
        self._settled, self._text = tokens, ""
        self._base, self._continuing = tokens, True
        self._list, self._border = _List.COMING, b""
        if self._path == CHAT and tokens == 0:
            # The client has the role at most. Repeating the request is exact, also with an output parser.
            self._chat = True
            return CHAT, with_token_ids(self._raw, sent)
        if not self._prompt:
            raise ValueError("the engine did not report the tokens of the prompt")
        self._chat = False
        body = {name: value for name, value in sent.items() if name in _SAMPLING}
        limit = self.limit(sent)
        if limit is not None and limit <= tokens:
            raise ValueError("all tokens were delivered, but the engine did not report the end")
        # A missing limit must be sent as a number: the default of completions is 16. vLLM subtracts the prompt.
        left = context if limit is None else limit - tokens
        if left is None:
            raise ValueError("max_tokens is missing, and vLLM does not report its context length")
        body |= {"max_tokens": left, "return_token_ids": True}
        body |= {"min_tokens": max(0, (sent.get("min_tokens") or 0) - tokens)}
        kept = b"".join(b",%d" % token for token in self._tokens)
        return COMPLETIONS, (b'{"prompt":[', *self._prompt, kept + b"],", to_json(body)[1:])

    def ending(self) -> bytes:
        """Return the missing end of a finished stream: usage if requested, and the final event."""
        usage = b""
        options = self.request().get("stream_options") or {}
        if options.get("include_usage") and not self._usage_given:
            prompt, completion = self._prompt_tokens, len(self._tokens)
            count = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
            usage = b"data: " + _dump({**self._frame, "choices": [], "usage": count}) + b"\n\n"
        return usage + b"data: [DONE]\n\n"


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


class Resumption:
    """Builds the continuing request with data from the next engine."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def request(self, group: RoutedGroup, transcript: Transcript) -> tuple[str, Pieces]:
        """Return path and body of the request that continues the stream at `group`.

        Raises:
            RefusedError: exact continuation is impossible.
        """
        sent = transcript.request()
        model = sent.get("model")
        context = await self._context(group, model) if transcript.limit(sent) is None else None
        for tokens, loose in transcript.alignments():
            if not transcript.loose_text or (loose and await self._text(group, model, loose) == transcript.loose_text):
                try:
                    return transcript.cut(sent, tokens, context)
                except ValueError as error:
                    raise RefusedError(errors.engine_lost(f"the stream cannot be continued: {error}")) from error
        message = "the stream cannot be continued: the tokens behind its last characters are not certain"
        raise RefusedError(errors.engine_lost(message))

    async def _text(self, group: RoutedGroup, model: object, tokens: list[int]) -> str | None:
        asked = json.dumps({"model": model, "tokens": tokens}).encode()
        found = await self._request_json(group, "POST", "/detokenize", asked)
        return None if found is None else str(found.get("prompt"))

    async def _context(self, group: RoutedGroup, model: object) -> int | None:
        """Return the maximum tokens of prompt and response."""
        found = await self._request_json(group, "GET", "/v1/models")
        cards = (found or {}).get("data", [])
        return next((card.get("max_model_len") for card in cards if model in (None, card["id"])), None)

    async def _request_json(
        self, group: RoutedGroup, method: str, path: str, body: bytes = b""
    ) -> dict[str, Any] | None:
        """Send a request of the gateway itself; return None unless vLLM answers with a JSON object."""
        headers = [(b"Content-Type", b"application/json"), *encode_headers(group.auth)]
        async with self._upstream.request(group.api, method, path, headers, (body,)) as answer:
            text = await answer.read()
        try:
            found = json.loads(text) if answer.status == 200 else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None
