"""`dsv4 chat`: which deployment is meant, whether it can answer, and the conversation with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from dsv4_operator.cli import chat, render
from dsv4_operator.cli.choose import named, the_one
from dsv4_operator.cli.errors import CommandError, ExitCode
from dsv4_operator.cli.look import Shown, look


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options."""

    max_tokens: int | None
    system: str | None
    thinking: bool | None
    silence_seconds: float


def run(root: Path, name: str | None, prompt: str | None, options: Options) -> ExitCode:
    """Answer one prompt, or hold a conversation on a terminal."""
    name, prompt = meaning(root, name, prompt)
    settings = settings_for(look(the_one(root, name)), options)
    text = chat.read_prompt(prompt)
    if text is None:
        return chat.converse(settings)
    return chat.once(settings, text, terminal=sys.stderr.isatty())


def meaning(root: Path, first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """Name and prompt: a lone argument is a name only if there is a deployment of that name."""
    if first is None or second is not None or named(root, first):
        return first, second
    return None, first


def settings_for(item: Shown, options: Options) -> chat.Settings:
    """How to talk to a deployment.

    Raises:
        CommandError: it does not serve, and why.
    """
    endpoint = item.status.endpoint
    if not item.running:
        raise CommandError(f"{item.name} is not serving: it is Stopped; start it with `dsv4 up FILE`")
    if endpoint is None or item.status.ready_replicas == 0:
        reason = render.not_ready(item.object)
        because = f": {reason}" if reason else ""
        raise CommandError(f"{item.name} is not serving: it is {item.phase}{because}")
    return chat.Settings(
        endpoint.rstrip("/"),
        item.object.served_names[0],
        options.max_tokens,
        options.system,
        options.thinking,
        options.silence_seconds,
    )
