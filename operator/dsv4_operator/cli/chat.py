"""Clients of a deployment: `dsv4 chat`, one streamed answer or a conversation on a terminal, and `dsv4 connect`,
settings of other clients, printed or written with a backup.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dsv4_operator.api import DeploymentPhase, DSV4Deployment
from dsv4_operator.api.spec import LOOPBACK
from dsv4_operator.backends.local.gateway import endpoint
from dsv4_operator.backends.local.state import DeploymentState, StateError
from dsv4_operator.cli.output import CommandError, ExitCode, bad_input, convert_os_errors, note, plural, print_line
from dsv4_operator.cli.render import not_ready_reason
from dsv4_operator.cli.sources.base import (
    STOPPED,
    DeploymentSource,
    DeploymentView,
    first_key,
    not_serving,
    read_file,
)
from dsv4_runtime.util import sse
from dsv4_runtime.util.files import replace_file

if TYPE_CHECKING:
    from dsv4_operator.cli.machine import Record

ChatMessage = dict[str, str]
ENVIRONMENT = "dsv4.env"
"""File with the variables of OpenAI's clients and Open WebUI, as for `docker run --env-file`."""
_NO_KEY = "none"
"""Key for deployments without keys: clients refuse an empty one."""


class ChatError(CommandError):
    """The server did not respond, or not with a chat answer."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options of `dsv4 chat`."""

    max_tokens: int | None
    system: str | None
    """System prompt."""
    thinking: bool | None
    """Passed to the model's chat template; None leaves it to the server."""
    silence_seconds: float
    """Limit for the next piece of an answer."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings of a conversation."""

    endpoint: str
    """Base URL, ending in `/v1`."""
    model: str
    options: AnswerOptions
    status: str = "dsv4 status"
    """Command that explains a failed connection."""
    why: str = "dsv4 why"
    """Command that explains an interrupted answer."""
    key: str = ""
    """API key; empty if none is required."""

    def body(self, messages: Sequence[ChatMessage]) -> dict[str, object]:
        """Return the request for the answer to `messages`."""
        options = self.options
        system: list[ChatMessage] = [{"role": "system", "content": options.system}] if options.system else []
        body: dict[str, object] = {
            "model": self.model,
            "messages": [*system, *messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        if options.thinking is not None:
            body["chat_template_kwargs"] = {"thinking": options.thinking}
        return body


@dataclass(slots=True)
class ChatAnswer:
    """An answer during streaming."""

    pieces: list[str] = field(default_factory=list)
    reported_tokens: int | None = None
    finish_reason: str | None = None
    first_piece: float | None = None
    last_piece: float | None = None

    @property
    def text(self) -> str:
        """Return the text received so far."""
        return "".join(self.pieces)

    @property
    def tokens(self) -> int:
        """Return the number of tokens reported by the server, or else the number of pieces."""
        return len(self.pieces) if self.reported_tokens is None else self.reported_tokens

    def speed(self) -> str:
        """Return `24 tokens, 13.0 tokens/s`; the time to the first token is not included."""
        count = plural(self.tokens, "token")
        if self.tokens < 2 or self.first_piece is None or self.last_piece is None:
            return count
        seconds = self.last_piece - self.first_piece
        return f"{count}, {(self.tokens - 1) / seconds:.1f} tokens/s" if seconds > 0 else count


def run(source: DeploymentSource, name: str | None, prompt: str | None, options: AnswerOptions) -> ExitCode:
    """Answer one prompt, or hold a conversation on a terminal."""
    name, prompt = split_arguments(source, name, prompt)
    item = source.get(name)
    check_serving(item)
    text = read_prompt(prompt)
    with source.api(item) as api:
        settings = ChatSettings(
            endpoint=api.url(),
            model=item.object.served_names[0],
            options=options,
            status=source.command_line("status", item.name),
            why=source.command_line("why", item.name),
            key=api.token,
        )
        if text is None:
            return converse(settings, address=api.url)
        return answer_once(settings, text, terminal=sys.stderr.isatty())


def split_arguments(source: DeploymentSource, first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """Return name and prompt; a single argument is a name only if there is a deployment of that name."""
    if first is None or second is not None or first in source.names():
        return first, second
    return None, first


def check_serving(item: DeploymentView) -> None:
    """Check that the deployment can answer. During a recovery it can: the gateway holds requests.

    Raises:
        CommandError: it does not serve, with the reason.
    """
    if item.phase == STOPPED:
        raise CommandError(f"{item.name} is not serving: it is Stopped; start it with `dsv4 up FILE`")
    held = item.status.phase is DeploymentPhase.RECOVERING
    if item.status.endpoint is None or (item.status.ready_replicas == 0 and not held):
        raise not_serving(item, not_ready_reason(item.object))


def error_text(body: str) -> str:
    """Return the message of an error of an OpenAI-compatible server; for other bodies their first 200 characters."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if isinstance(document, dict):
        inner = document.get("error", document)
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            return str(inner["message"])
        if isinstance(inner, str):
            return inner
    return " ".join(body.split())[:200] or "no reason given"


def events(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of every event in a byte stream; comments and other fields are skipped."""
    splitter = sse.Splitter()
    for chunk in chunks:
        for event in splitter.feed(chunk):
            if data := sse.payload(event):
                yield data.decode(errors="replace")
    # A last event without the blank line.
    if data := sse.payload(splitter.rest):
        yield data.decode(errors="replace")


def read_event(answer: ChatAnswer, data: str, now: float) -> str:
    """Add one event to `answer` and return its text.

    Raises:
        ChatError: the event reports an error, or is no chat completion chunk.
    """
    try:
        chunk: Any = json.loads(data)
        if "error" in chunk:
            raise ChatError(f"the answer broke off: {error_text(data)}")
        if usage := chunk.get("usage"):
            answer.reported_tokens = usage["completion_tokens"]
        piece = ""
        for choice in chunk.get("choices", ()):
            piece += choice["delta"].get("content") or ""
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChatError(f"the server sent something that is no part of a chat answer: {data[:100]}") from error
    if piece:
        answer.pieces.append(piece)
        answer.first_piece = answer.first_piece or now
        answer.last_piece = now
    return piece


def stream(settings: ChatSettings, messages: Sequence[ChatMessage], answer: ChatAnswer) -> Iterator[str]:
    """Yield the pieces of the answer to `messages` as they arrive, and add them to `answer`.

    Raises:
        ChatError: the connection or the answer failed, with a message for the user.
    """
    import aiohttp

    from dsv4_operator.verify import endpoint as http

    done, silence = False, settings.options.silence_seconds
    url, body = f"{settings.endpoint}/chat/completions", settings.body(messages)
    try:
        with http.open_url("POST", url, token=settings.key, body=body, silence_seconds=silence) as response:
            if response.status != HTTPStatus.OK:
                text = error_text(response.read().decode(errors="replace"))
                raise ChatError(f"{settings.endpoint} answered {response.status}: {text}")
            for data in events(response.chunks()):
                if data == "[DONE]":
                    done = True
                    break
                if piece := read_event(answer, data, time.monotonic()):
                    yield piece
    except TimeoutError as error:
        seconds = http.CONNECT_SECONDS if isinstance(error, aiohttp.ConnectionTimeoutError) else silence
        raise ChatError(f"{settings.endpoint} sent nothing for {seconds:g} s; see `{settings.why}`") from error
    except aiohttp.ClientConnectorError as error:
        raise ChatError(
            f"{settings.endpoint} does not answer ({http.reason(error)}); see `{settings.status}`"
        ) from error
    except http.ERRORS as error:
        raise ChatError(f"the answer broke off ({http.reason(error)}); see `{settings.why}`") from error
    except sse.EventTooLongError as error:
        raise ChatError(f"{settings.endpoint} sent an event that does not end; see `{settings.why}`") from error
    if not done and answer.finish_reason is None:
        raise ChatError(f"the answer broke off before its end; see `{settings.why}`")


def answer_once(settings: ChatSettings, prompt: str, *, terminal: bool) -> ExitCode:
    """Stream the answer to one prompt to stdout; on a terminal, print its speed to stderr."""
    answer = ChatAnswer()
    _print_stream(stream(settings, [{"role": "user", "content": prompt}], answer))
    if terminal:
        note(f"[{answer.speed()}]")
    return ExitCode.OK


def converse(
    settings: ChatSettings, *, address: Callable[[], str] | None = None, read: Callable[[str], str] = input
) -> ExitCode:
    """Read prompts and print answers until the end of input.

    Ctrl-C stops the present answer, and at the prompt the conversation. `address` returns the endpoint of the next
    answer, if it can change.
    """
    note(f"Talking to {settings.model}; Ctrl-D ends.")
    messages: list[ChatMessage] = []
    while True:
        try:
            prompt = read("> ").strip()
        except EOFError:
            note("")
            return ExitCode.OK
        if not prompt:
            continue
        messages.append({"role": "user", "content": prompt})
        answer = ChatAnswer()
        try:
            if address is not None:
                settings = replace(settings, endpoint=address())
            _print_stream(stream(settings, messages, answer))
            note(f"[{answer.speed()}]")
        except KeyboardInterrupt:
            note("\n[stopped]")
        except CommandError as error:
            note(f"error: {error}")
        if answer.text:
            messages.append({"role": "assistant", "content": answer.text})
        else:
            # User and assistant messages must alternate.
            messages.pop()


def read_prompt(prompt: str | None) -> str | None:
    """Return the given prompt, or all of stdin; None for a conversation, if stdin is a terminal."""
    if prompt is None and sys.stdin.isatty():
        return None
    text = sys.stdin.read() if prompt in (None, "-") else str(prompt)
    if not text.strip():
        raise bad_input("the prompt is empty; give one as an argument or on stdin")
    return text


def _print_stream(pieces: Iterator[str]) -> None:
    ended = True
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            ended = piece.endswith("\n")
    finally:
        if not ended:
            print(flush=True)


class Client(StrEnum):
    """Clients with settings."""

    ALL = "all"
    CLAUDE = "claude"
    OPENAI = "openai"
    WEBUI = "webui"


@dataclass(frozen=True, slots=True)
class Access:
    """Access of clients to a deployment."""

    url: str
    """Ends in `/v1`."""
    key: str
    model: str

    def variables(self, client: Client) -> dict[str, str]:
        """Return the environment of a client."""
        key = self.key or _NO_KEY
        match client:
            case Client.CLAUDE:
                # Claude Code appends /v1/messages. It uses the small model for titles and summaries.
                return {
                    "ANTHROPIC_BASE_URL": self.url.removesuffix("/v1"),
                    "ANTHROPIC_AUTH_TOKEN": key,
                    "ANTHROPIC_MODEL": self.model,
                    "ANTHROPIC_SMALL_FAST_MODEL": self.model,
                }
            case Client.OPENAI:
                return {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": key, "OPENAI_MODEL": self.model}
            case Client.WEBUI:
                return {"OPENAI_API_BASE_URL": self.url, "OPENAI_API_KEY": key}
        return self.variables(Client.OPENAI) | self.variables(Client.WEBUI)


_TITLES = {Client.CLAUDE: "Claude Code", Client.OPENAI: "OpenAI clients", Client.WEBUI: "Open WebUI"}


def connect(
    source: DeploymentSource, name: str | None, client: Client, root: Path, record: Record | None, *, write: bool
) -> ExitCode:
    """Print the settings, or write them.

    Args:
        source: of the deployment.
        name: a deployment, or its file, from which the address is known on every machine.
        client: selects the settings.
        root: state directory of this machine, with the secrets of a file or of a deployment on other machines.
        record: such a deployment.
        write: change files instead of printing.

    Raises:
        CommandError: the deployment does not serve, or a file cannot be changed.
    """
    if name and Path(name).is_file():
        access = _access_from_here(read_file(name, detect_hardware=True), root, "MACHINE")
    elif record is not None:
        from dsv4_operator.cli import hosts

        access = _access_from_here(hosts.deployment(record), root, record.inventory.hosts[0].target)
    else:
        access = _access(source, name)
    selected = [each for each in _TITLES if client in (each, Client.ALL)]
    if not write:
        for number, each in enumerate(selected):
            print_line(f"{'' if number == 0 else chr(10)}# {_TITLES[each]}")
            for variable, value in access.variables(each).items():
                print_line(f"export {variable}={shlex.quote(value)}")
        return ExitCode.OK
    if Client.CLAUDE in selected:
        folder = Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude")
        write_settings(folder / "settings.json", access.variables(Client.CLAUDE))
    if others := [each for each in selected if each is not Client.CLAUDE]:
        found: dict[str, str] = {}
        for each in others:
            found |= access.variables(each)
        write_environment(Path(ENVIRONMENT), found)
    return ExitCode.OK


def _access_from_here(deployment: DSV4Deployment, root: Path, machine: str) -> Access:
    """Return the access to a deployment on `machine`, with the key on this one."""
    keys, key = deployment.spec.gateway.api_keys, ""
    if keys is not None:
        try:
            state = DeploymentState(root, deployment.metadata.name)
            key = first_key(state.secret(keys.secret_key_ref, "spec.gateway.apiKeys"))
        except StateError as error:
            raise bad_input(str(error)) from None
    url = endpoint(deployment)
    if urlsplit(url).hostname == LOOPBACK:
        port = deployment.spec.network.ports.api
        note(f"{url} is of the machine that serves it; elsewhere: `ssh -L {port}:{LOOPBACK}:{port} {machine}`")
    return Access(url, key, deployment.served_names[0])


def _access(source: DeploymentSource, name: str | None) -> Access:
    item = source.get(name)
    with source.api(item) as api:
        if not api.permanent:
            raise bad_input(
                f"{item.name}: the address {api.url()} ends with this command; on a cluster, publish the Service of "
                "the gateway, and use its address with the variables of `dsv4 connect FILE`"
            )
        access = Access(api.url(), api.token, item.object.served_names[0])
    if item.object.spec.gateway.api_keys is not None and not access.key:
        raise CommandError(f"{item.name}: the API key cannot be read; see spec.gateway.apiKeys")
    return access


def write_settings(file: Path, variables: Mapping[str, str]) -> None:
    """Set `variables` in `env` of Claude Code's settings; other settings stay.

    Raises:
        CommandError: the file contains no settings, or cannot be written. It is unchanged then.
    """
    before = _read(file)
    document: Any = {}
    if before is not None and before.strip():
        try:
            document = json.loads(before)
        except ValueError as error:
            raise bad_input(f"{file} is not JSON ({error}); correct it, or move it away") from None
    environment = document.get("env", {}) if isinstance(document, dict) else None
    if not isinstance(environment, dict):
        raise bad_input(f"{file} has no object of settings with an object `env`; correct it, or move it away")
    document["env"] = {**environment, **variables}
    _write(file, before, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def write_environment(file: Path, variables: Mapping[str, str]) -> None:
    """Set `variables` in a file of lines `NAME=VALUE`; other lines stay.

    Raises:
        CommandError: the file cannot be read or written.
    """
    before = _read(file)
    lines = [line for line in (before or "").splitlines() if line.partition("=")[0].strip() not in variables]
    lines += [f"{name}={value}" for name, value in variables.items()]
    _write(file, before, "\n".join(lines) + "\n")


def _read(file: Path) -> str | None:
    try:
        with convert_os_errors("cannot read"):
            return file.read_text(encoding="utf-8") if file.exists() else None
    except UnicodeDecodeError:
        raise bad_input(f"{file} is not UTF-8 text; correct it, or move it away") from None


def _write(file: Path, before: str | None, after: str) -> None:
    """Replace a file that differs, after a copy of it. Links stay."""
    if before == after:
        note(f"{file}: unchanged")
        return
    with convert_os_errors("cannot write"):
        target = file.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        if before is not None:
            backup = target.with_name(f"{target.name}.{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**9}.bak")
            replace_file(backup, before)
            note(f"{file}: the earlier file is {backup}")
        # It contains a key.
        replace_file(target, after)
    note(f"{file}: written")
