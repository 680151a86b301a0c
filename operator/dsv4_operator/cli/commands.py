"""Commands that can be typed, with their options and help. What a command does is imported when it is called."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dsv4_operator.cli.errors import ExitCode, bad_input
from dsv4_operator.cli.output import DocumentFormat, TableFormat, say
from dsv4_operator.cli.where import PLUGIN, CommandTarget, deployment_names, placed, placed_here

app = typer.Typer(
    name="dsv4",
    help="Run DeepSeek-V4 and keep it running.",
    epilog="Exit codes: 0 all went well; 1 it failed; 2 the input or the machine's state is not right for it; "
    "130 interrupted. Colours only on a terminal, and not with NO_COLOR set.",
    # A shell completes `kubectl dsv4` by asking kubectl.
    add_completion=Path(sys.argv[0]).name != PLUGIN,
    pretty_exceptions_enable=False,
    # Plain help: loading the formatter would take longer than all the rest of `dsv4 --help`.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NAME_HELP = "The deployment; may be left out when there is only one."
NameArgument = Annotated[
    str | None, typer.Argument(metavar="NAME", help=NAME_HELP, show_default=False, autocompletion=deployment_names)
]
FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="A DSV4Deployment as YAML or JSON; - is stdin.")]
FormatOption = Annotated[
    DocumentFormat | None,
    typer.Option("--output", "-o", metavar="json|yaml", help="Print a document instead of text.", show_default=False),
]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    shown: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Run DeepSeek-V4 and keep it running."""
    if shown:
        raise typer.Exit(version(None))
    if context.invoked_subcommand is None:
        say(context.get_help())


@app.command()
@placed_here
def up(
    where: CommandTarget,
    file: FileArgument,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it is ready and leave it running.")
    ] = False,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long the start may take, for example 90s or 10m.")
    ] = "10m",
) -> int:
    """Start a deployment on this machine and keep it running. Ctrl-C ends it."""
    root = where.here("starts a deployment", "kubectl apply -f FILE")
    from dsv4_operator.cli import up as command

    return command.run(command.UpOptions(file, root, detach, _duration("--timeout", timeout)))


@app.command()
@placed_here
def down(
    where: CommandTarget,
    name: NameArgument = None,
    every: Annotated[bool, typer.Option("--all", help="End every deployment.")] = False,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also remove its logs, evidence and status (never the weights).")
    ] = False,
) -> int:
    """End a deployment of this machine; fine if it is not running."""
    root = where.here("ends a deployment", f"kubectl delete dsv4 {name or 'NAME'}")
    from dsv4_operator.cli import down as command

    if every and name:
        raise bad_input(f"--all and the name {name!r} exclude each other; give one of them")
    return command.run(root, name, every=every, purge=purge)


@app.command()
@placed
def status(
    where: CommandTarget,
    name: NameArgument = None,
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="A cluster's deployments in all namespaces.")
    ] = False,
    output: Annotated[
        TableFormat, typer.Option("--output", "-o", metavar="table|wide|json|yaml", help="How to print it.")
    ] = TableFormat.TABLE,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on, and show every change.")] = False,
) -> int:
    """Show a deployment with its members, or all deployments."""
    from dsv4_operator.cli import status as command

    if everywhere and name:
        raise bad_input(f"--all-namespaces and the name {name!r} exclude each other; give one of them")
    source = replace(where, cluster=where.cluster or everywhere).source()
    return command.show(source, name, output, watch=watch, everywhere=everywhere)


@app.command()
@placed
def chat(
    where: CommandTarget,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help=f"{NAME_HELP} Then the prompt comes first.",
            show_default=False,
            autocompletion=deployment_names,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="What to ask; else stdin, or a conversation on a terminal.", show_default=False
        ),
    ] = None,
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

    options = talk.TalkOptions(max_tokens, system, thinking, _duration("--timeout", timeout))
    return talk.run(where.source(), name, prompt, options)


@app.command()
@placed
def dashboard(
    where: CommandTarget,
    name: NameArgument = None,
    group: Annotated[int, typer.Option(min=0, metavar="N", help="Which group.")] = 0,
) -> int:
    """Show the way to Ray's dashboard. On a cluster it is open until Ctrl-C."""
    from dsv4_operator.cli import dashboard as command

    return command.show(where.source(), name, group)


@app.command()
@placed
def logs(
    where: CommandTarget,
    name_or_rank: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help=f"{NAME_HELP} Then the rank comes first.",
            show_default=False,
            autocompletion=deployment_names,
        ),
    ] = None,
    rank: Annotated[
        str | None, typer.Argument(metavar="RANK", help="One member; else all.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option("--name", hidden=True)] = None,
    component: Annotated[
        str, typer.Option("--component", "-c", metavar="agent|ray|vllm|loop|all", help="Whose log.")
    ] = "all",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only the last lines of each file.", show_default=False)
    ] = None,
    output: FormatOption = None,
) -> int:
    """Show what the members wrote. With `-c loop`: what was decided about them."""
    from dsv4_operator.cli.log_lines import LogComponent, LogOptions

    if component not in list(LogComponent):
        raise bad_input(f"--component {component!r} is unknown; use one of {', '.join(LogComponent)}")
    if rank is None and name_or_rank is not None and name_or_rank.isdecimal():
        # A name begins with a letter.
        name_or_rank, rank = None, name_or_rank
    if rank is not None and not rank.isdecimal():
        raise bad_input(f"RANK {rank!r} is no number; give that of a member, such as 0")
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    request = LogOptions(None if rank is None else int(rank), LogComponent(component), follow, tail, output, colour)
    return where.source().logs(name_or_rank or name, request)


@app.command()
@placed
def why(where: CommandTarget, name: NameArgument = None, output: FormatOption = None) -> int:
    """Say what died last, why, and what became of it."""
    from dsv4_operator.cli import why as command

    return command.show(where.source(), name, output)


@app.command()
@placed
def kernels(where: CommandTarget, name: NameArgument = None, output: FormatOption = None) -> int:
    """Show who computes the operations of a layer, and why."""
    from dsv4_operator.cli import kernels as command

    return command.show(where.source(), name, output)


@app.command()
@placed
def evidence(
    where: CommandTarget,
    name: NameArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="[default: NAME-evidence-TIME.tar.gz]", show_default=False),
    ] = None,
) -> int:
    """Pack logs, status and what was kept of deaths into a .tar.gz."""
    from dsv4_operator.cli import evidence as command

    return command.pack(where.source(), name, output)


@app.command()
@placed
def restart(where: CommandTarget, name: NameArgument = None) -> int:
    """Form every group of a cluster's deployment anew."""
    source = where.source()
    return _said(source.restart(source.one(name)))


@app.command()
@placed
def suspend(where: CommandTarget, name: NameArgument = None) -> int:
    """Stop a cluster's deployment; its weights stay."""
    source = where.source()
    return _said(source.suspend(source.one(name), True))


@app.command()
@placed
def resume(where: CommandTarget, name: NameArgument = None) -> int:
    """Start what was suspended."""
    source = where.source()
    return _said(source.suspend(source.one(name), False))


@app.command()
@placed
def plan(
    where: CommandTarget,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A DSV4Deployment as YAML or JSON; - is stdin. On a cluster also a deployment's name.",
            autocompletion=deployment_names,
            show_default=False,
        ),
    ] = None,
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
    from_log: Annotated[
        str | None,
        typer.Option(metavar="LOG", help="Compare with vLLM's log of such a start, term by term.", show_default=False),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="TERM", help="Show the logged starts behind a figure, such as kv.", show_default=False),
    ] = None,
    output: FormatOption = None,
) -> int:
    """Show whether it fits, and where the memory goes. Nothing is started or written."""
    from dsv4_operator.cli import plan as command

    if explain is not None:
        return command.explain(explain, output)
    if what is None:
        raise bad_input("FILE is missing; name a file, or give --explain TERM")
    return command.show(where.source(), command.PlanOptions(what, what_if or (), machine, output, from_log))


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
    output: FormatOption = None,
) -> int:
    """Check whether this machine's network is fit, with a remedy for what is not."""
    from ipaddress import AddressValueError, IPv4Address

    from dsv4_operator.cli import doctor as command

    for address in peer or ():
        try:
            IPv4Address(address)
        except AddressValueError as error:
            raise bad_input(f"--peer {address!r} is no IPv4 address ({error}); give that of the other end") from None
    return command.run(command.DoctorOptions(require_rdma, mtu, tuple(peer or ()), _duration("--wait", wait), output))


@app.command()
def version(output: FormatOption = None) -> int:
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


def _said(sentence: str) -> int:
    from dsv4_operator.cli.output import say

    say(sentence)
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
