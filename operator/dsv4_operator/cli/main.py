"""The `dsv4` command: options, help, and how everything ends. What a command does is imported when it is called."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dsv4_operator.cli.errors import CommandError, ExitCode, bad_input
from dsv4_operator.cli.output import DocumentFormat, TableFormat, note

app = typer.Typer(
    name="dsv4",
    help="Run DeepSeek-V4 and keep it running.",
    epilog="Exit codes: 0 all went well; 1 it failed; 2 the input or the machine's state is not right for it; "
    "130 interrupted. Colours only on a terminal, and not with NO_COLOR set.",
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: loading the formatter would take longer than all the rest of `dsv4 --help`.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StateDirectory = Annotated[
    Path | None,
    typer.Option(
        "--state-dir", metavar="DIR", help="Where deployments are kept [default: $DSV4_STATE_DIR, else ~/.dsv4]."
    ),
]
NAME_HELP = "The deployment; may be left out when there is only one."
Name = Annotated[str | None, typer.Argument(metavar="NAME", help=NAME_HELP, show_default=False)]
File = Annotated[str, typer.Argument(metavar="FILE", help="A DSV4Deployment as YAML or JSON; - is stdin.")]
Format = Annotated[
    DocumentFormat | None,
    typer.Option("--output", "-o", metavar="json|yaml", help="Print a document instead of text.", show_default=False),
]


@app.command()
def up(
    file: File,
    state_dir: StateDirectory = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it is ready and leave it running.")
    ] = False,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long the start may take, for example 90s or 10m.")
    ] = "10m",
) -> int:
    """Start a deployment on this machine and keep it running. Ctrl-C ends it."""
    from dsv4_operator.cli import up as command
    from dsv4_operator.cli.choose import root_directory

    return command.run(command.Request(file, root_directory(state_dir), detach, _duration("--timeout", timeout)))


@app.command()
def down(
    name: Name = None,
    state_dir: StateDirectory = None,
    every: Annotated[bool, typer.Option("--all", help="End every deployment.")] = False,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also remove its logs, evidence and status (never the weights).")
    ] = False,
) -> int:
    """End a deployment; fine if it is not running."""
    from dsv4_operator.cli import down as command
    from dsv4_operator.cli.choose import root_directory

    if every and name:
        raise bad_input(f"--all and the name {name!r} exclude each other; give one of them")
    return command.run(root_directory(state_dir), name, every=every, purge=purge)


@app.command()
def status(
    name: Name = None,
    state_dir: StateDirectory = None,
    output: Annotated[
        TableFormat, typer.Option("--output", "-o", metavar="table|wide|json|yaml", help="How to print it.")
    ] = TableFormat.TABLE,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on, and show every change.")] = False,
) -> int:
    """Show a deployment with its members, or all deployments."""
    from dsv4_operator.cli import status as command
    from dsv4_operator.cli.choose import root_directory

    return command.show(root_directory(state_dir), name, output, watch=watch)


@app.command()
def chat(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help=f"{NAME_HELP} Then the prompt comes first.", show_default=False),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="What to ask; else stdin, or a conversation on a terminal.", show_default=False
        ),
    ] = None,
    state_dir: StateDirectory = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The longest answer, in tokens.", show_default=False)
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Instructions before the conversation.", show_default=False)
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="Reason before answering; else as the server is set."),
    ] = None,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="The longest wait for the next piece of the answer.")
    ] = "2m",
) -> int:
    """Ask the model and stream its answer."""
    from dsv4_operator.cli import talk
    from dsv4_operator.cli.choose import root_directory

    options = talk.Options(max_tokens, system, thinking, _duration("--timeout", timeout))
    return talk.run(root_directory(state_dir), name, prompt, options)


@app.command()
def logs(
    rank: Annotated[
        int | None, typer.Argument(metavar="RANK", min=0, help="One member; else all.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-n", metavar="NAME", help=NAME_HELP, show_default=False)
    ] = None,
    state_dir: StateDirectory = None,
    component: Annotated[
        str, typer.Option("--component", "-c", metavar="agent|ray|vllm|loop|all", help="Whose log.")
    ] = "all",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only the last lines of each file.", show_default=False)
    ] = None,
    output: Format = None,
) -> int:
    """Show what the members wrote. With `-c loop`: what was decided about them."""
    from dsv4_operator.cli import logs as command
    from dsv4_operator.cli.choose import root_directory, the_one

    if component not in list(command.Component):
        raise bad_input(f"--component {component!r} is unknown; use one of {', '.join(command.Component)}")
    request = command.Request(
        rank, command.Component(component), follow, tail, output, sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    return command.show(the_one(root_directory(state_dir), name), request)


@app.command()
def why(name: Name = None, state_dir: StateDirectory = None, output: Format = None) -> int:
    """Say what died last, why, and what became of it."""
    from dsv4_operator.cli import why as command
    from dsv4_operator.cli.choose import root_directory

    return command.show(root_directory(state_dir), name, output)


@app.command()
def evidence(
    name: Name = None,
    state_dir: StateDirectory = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="[default: NAME-evidence-TIME.tar.gz]", show_default=False),
    ] = None,
) -> int:
    """Pack logs, status and what was kept of every death into one .tar.gz."""
    from dsv4_operator.cli import evidence as command
    from dsv4_operator.cli.choose import root_directory

    return command.pack(root_directory(state_dir), name, output)


@app.command()
def plan(
    file: File,
    state_dir: StateDirectory = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Plan with a field below spec changed, such as engine.maxNumBatchedTokens=4096; may be repeated.",
            show_default=False,
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Which machine of the hardware, such as gb10-64gb.", show_default=False),
    ] = None,
    output: Format = None,
) -> int:
    """Show whether it fits, where the memory goes, and what `up` would do. Nothing is started or written."""
    from dsv4_operator.cli import plan as command
    from dsv4_operator.cli.choose import root_directory

    return command.show(command.Request(file, root_directory(state_dir), what_if or (), machine, output))


@app.command()
def doctor(
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Also try the path to a machine on which the same command runs meanwhile; may be repeated.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait for --peer.")] = "30s",
    mtu: Annotated[
        int | None,
        typer.Option(min=576, max=65_535, metavar="BYTES", help="What paths must carry.", show_default=False),
    ] = None,
    require_rdma: Annotated[
        bool, typer.Option("--require-rdma", help="Fail without RDMA, also where no cable is plugged in.")
    ] = False,
    output: Format = None,
) -> int:
    """Check whether this machine's network is fit, with a remedy for what is not."""
    from ipaddress import AddressValueError, IPv4Address

    from dsv4_operator.cli import doctor as command

    for address in peer or ():
        try:
            IPv4Address(address)
        except AddressValueError as error:
            raise bad_input(f"--peer {address!r} is no IPv4 address ({error}); give that of the other end") from None
    return command.run(command.Request(require_rdma, mtu, tuple(peer or ()), _duration("--wait", wait), output))


@app.command()
def version(output: Format = None) -> int:
    """Show the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from dsv4_operator.cli.output import render_document, say

    try:
        number = installed("dsv4")
    except PackageNotFoundError:
        number = "unknown"
    say(f"dsv4 {number}" if output is None else render_document({"version": number}, output))
    return ExitCode.OK


def _duration(option: str, text: str) -> float:
    from dsv4_operator.api.values import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise bad_input(f"{option}: {error}") from None
    if seconds <= 0:
        raise bad_input(f"{option}: {text!r} is no time at all; write for example 10m")
    return seconds


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code."""
    try:
        # A closed pipe, as with `| head`, is typer's business: it ends quietly with 1.
        result = app(arguments or ["--help"], prog_name=_program(), standalone_mode=False)
    except CommandError as error:
        for message in error.messages:
            note(f"error: {message}")
        return error.code
    except typer.TyperException as error:
        note(f"error: {error.format_message().rstrip('.')}; see `{_program()} --help`")
        return ExitCode.BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        note("")
        return ExitCode.INTERRUPTED
    return int(result or 0)


def _program() -> str:
    return "kubectl dsv4" if Path(sys.argv[0]).name == "kubectl-dsv4" else "dsv4"


def main() -> None:
    """The entry point of `dsv4` and `kubectl-dsv4`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal's character set lacks is no reason to say nothing.
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))
