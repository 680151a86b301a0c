"""`dsv4 chat`: which deployment is meant, whether it can answer, and the conversation with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dsv4_operator.api import DeploymentPhase
from dsv4_operator.cli import chat, render
from dsv4_operator.cli.errors import CommandError, ExitCode
from dsv4_operator.cli.look import STOPPED, DeploymentView
from dsv4_operator.cli.source import DeploymentSource, not_serving


@dataclass(frozen=True, slots=True)
class TalkOptions:
    """The command's options."""

    max_tokens: int | None
    system: str | None
    thinking: bool | None
    silence_seconds: float


def run(source: DeploymentSource, name: str | None, prompt: str | None, options: TalkOptions) -> ExitCode:
    """Answer one prompt, or hold a conversation on a terminal."""
    name, prompt = meaning(source, name, prompt)
    item = source.one(name)
    check_serving(item)
    text = chat.read_prompt(prompt)
    with source.api(item) as api:
        settings = chat.Settings(
            api.url(),
            item.object.served_names[0],
            options.max_tokens,
            options.system,
            options.thinking,
            options.silence_seconds,
            source.command("status", item.name),
            source.command("why", item.name),
            api.key,
        )
        if text is None:
            return chat.converse(settings, address=api.url)
        return chat.once(settings, text, terminal=sys.stderr.isatty())


def meaning(source: DeploymentSource, first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """Return name and prompt: a lone argument is a name only if there is a deployment of that name."""
    if first is None or second is not None or first in source.names():
        return first, second
    return None, first


def check_serving(item: DeploymentView) -> None:
    """Raise the reason for which a deployment cannot answer. While it recovers, its gateway holds what is asked.

    Raises:
        CommandError: it does not serve, and why.
    """
    if item.phase == STOPPED:
        raise CommandError(f"{item.name} is not serving: it is Stopped; start it with `dsv4 up FILE`")
    held = item.status.phase is DeploymentPhase.RECOVERING
    if item.status.endpoint is None or (item.status.ready_replicas == 0 and not held):
        raise not_serving(item, render.not_ready(item.object))
