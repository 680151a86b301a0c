"""Command line of `dsv4`: commands, options and help. The implementation of a command is imported when it runs."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4_operator.cli.errors import KUBECTL_PLUGIN, CommandError, ExitCode, bad_input, program_name
from dsv4_operator.cli.output import DocumentFormat, TableFormat, print_line, render_document

if TYPE_CHECKING:
    from dsv4_operator.cli.sources.base import DeploymentSource

_COMPLETION_SECONDS = 3.0

app = typer.Typer(
    name="dsv4",
    help="Run DeepSeek-V4 and keep it running.",
    epilog="Exit codes: 0 all went well; 1 it failed; 2 the input or the machine's state is not right for it; "
    "3 a plan is uncertain; 130 interrupted. Colours only on a terminal, and not with NO_COLOR set.",
    # Completion of `kubectl dsv4` is configured in kubectl.
    add_completion=Path(sys.argv[0]).name != KUBECTL_PLUGIN,
    pretty_exceptions_enable=False,
    # Plain help: importing the formatter would take longer than the rest of `dsv4 --help`.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """Options that select the deployments of this machine or of a cluster."""

    state_dir: Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help="State directory of this machine [default: $DSV4_STATE_DIR, else ~/.dsv4].",
        ),
    ] = None
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Use the deployments of a cluster; implied by the next three options and kubectl dsv4."
        ),
    ] = False
    context: Annotated[
        str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig file.")
    ] = None
    kubeconfig: Annotated[
        Path | None, typer.Option("--kubeconfig", metavar="FILE", help="Path of the kubeconfig file.")
    ] = None
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAME", help="[default: the context's]")
    ] = None

    @property
    def is_cluster(self) -> bool:
        """Return whether a cluster is selected: always for `kubectl dsv4`, for `dsv4` by any cluster option."""
        return program_name() != "dsv4" or self._cluster_option is not None

    @property
    def _cluster_option(self) -> str | None:
        names = ("cluster", "context", "kubeconfig", "namespace")
        return next((f"--{name}" for name in names if getattr(self, name)), None)

    def source(self) -> DeploymentSource:
        """Return the source of deployments.

        Raises:
            CommandError: the options contradict each other.
        """
        if not self.is_cluster:
            from dsv4_operator.cli.sources.local import LocalSource

            return LocalSource(self.state_root())
        if self.state_dir is not None:
            raise bad_input(
                f"--state-dir selects this machine and {self._cluster_option or program_name()} selects a cluster; "
                "use one of them"
            )
        from dsv4_operator.cli.sources.cluster import ClusterSource

        return ClusterSource(self.context, self.kubeconfig, self.namespace)

    def state_root(self) -> Path:
        """Return the state directory of this machine.

        The path is absolute, because the reconcile loop runs in another working directory.
        """
        from dsv4_operator.backends.local.state import default_root

        return Path((self.state_dir or default_root()).expanduser()).absolute()

    def local_root(self, action: str, alternative: str) -> Path:
        """Return the state directory, for a command that is not available for clusters.

        Raises:
            CommandError: a cluster is selected.
        """
        if self.is_cluster:
            raise bad_input(f"this command {action} on this machine; on a cluster: {alternative}")
        return self.state_root()


_TARGET_OPTIONS = inspect.signature(CommandTarget, eval_str=True).parameters


def with_target_options(
    command: Callable[..., int], names: Sequence[str] = tuple(_TARGET_OPTIONS)
) -> Callable[..., int]:
    """Append the target options to `command` and pass them as its first argument, a `CommandTarget`."""

    @functools.wraps(command)
    def wrapper(**given: Any) -> int:
        target = CommandTarget(**{name: given.pop(name) for name in names})
        return command(target, **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    parameters = [each.replace(kind=keyword) for each in (*own, *(_TARGET_OPTIONS[name] for name in names))]
    wrapper.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapper


with_state_dir_option = functools.partial(with_target_options, names=("state_dir",))
"""Append the option `--state-dir` alone, for a command that is not available for clusters."""


def deployment_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the completions of a deployment name for the target options given so far; none on errors."""
    given = {name: value for name, value in ctx.params.items() if name in _TARGET_OPTIONS}
    try:
        names = CommandTarget(**given).source().names(seconds=_COMPLETION_SECONDS)
    except CommandError:
        return []
    return [name for name in names if name.startswith(incomplete)]


def _name_argument(remark: str = "") -> Any:
    text = f"The deployment; may be left out when there is only one.{remark}"
    return typer.Argument(metavar="NAME", help=text, autocompletion=deployment_names)


NameArgument = Annotated[str | None, _name_argument()]
FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="A DSV4Deployment as YAML or JSON; - is stdin.")]
FormatOption = Annotated[
    DocumentFormat | None,
    typer.Option("--output", "-o", metavar="json|yaml", help="Print a document instead of text."),
]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Run DeepSeek-V4 and keep it running."""
    if show_version:
        raise typer.Exit(version(None))
    if context.invoked_subcommand is None:
        print_line(context.get_help())


@app.command()
@with_state_dir_option
def up(
    target: CommandTarget,
    file: FileArgument,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when the deployment is ready; it keeps running.")
    ] = False,
    timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="Timeout of the start, for example 90s or 10m.")
    ] = "10m",
) -> int:
    """Start a deployment on this machine and keep it running. Ctrl-C ends it."""
    root = target.local_root("starts a deployment", "kubectl apply -f FILE")
    from dsv4_operator.cli import up as command

    return command.run(file, root, detach=detach, timeout=_duration("--timeout", timeout))


@app.command()
@with_state_dir_option
def down(
    target: CommandTarget,
    name: NameArgument = None,
    all_deployments: Annotated[bool, typer.Option("--all", help="Stop all deployments.")] = False,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also remove its logs, evidence and status (never the weights).")
    ] = False,
) -> int:
    """Stop a deployment of this machine; no error if it is not running."""
    root = target.local_root("ends a deployment", f"kubectl delete dsv4 {name or 'NAME'}")
    from dsv4_operator.cli import up as command

    if all_deployments and name:
        raise bad_input(f"--all and the name {name!r} are mutually exclusive; use one of them")
    return command.down(root, name, all_deployments=all_deployments, purge=purge)


@app.command()
@with_target_options
def status(
    target: CommandTarget,
    name: NameArgument = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show the deployments of all namespaces of a cluster.")
    ] = False,
    output: Annotated[
        TableFormat, typer.Option("--output", "-o", metavar="table|wide|json|yaml", help="Output format.")
    ] = TableFormat.TABLE,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Watch for changes after the first output.")] = False,
) -> int:
    """Show a deployment with its members, or all deployments."""
    from dsv4_operator.cli import status as command

    if all_namespaces and name:
        raise bad_input(f"--all-namespaces and the name {name!r} are mutually exclusive; use one of them")
    source = replace(target, cluster=target.cluster or all_namespaces).source()
    return command.show(source, name, output, watch=watch, all_namespaces=all_namespaces)


@app.command()
@with_target_options
def chat(
    target: CommandTarget,
    name: Annotated[str | None, _name_argument(" Then the prompt comes first.")] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Message; default: stdin, or an interactive conversation on a terminal."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Maximum tokens of the answer.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="Enable or disable reasoning; default: that of the server."),
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Timeout for the next part of the answer.")] = "2m",
) -> int:
    """Send a message to the model and stream the answer."""
    from dsv4_operator.cli import chat as command

    silence_seconds = _duration("--timeout", timeout)
    options = command.AnswerOptions(max_tokens, system, thinking, silence_seconds)
    return command.run(target.source(), name, prompt, options)


@app.command()
@with_target_options
def dashboard(
    target: CommandTarget,
    name: NameArgument = None,
    group: Annotated[int, typer.Option(min=0, metavar="N", help="Group number.")] = 0,
) -> int:
    """Show the address of the Ray dashboard; on a cluster, forward a port until Ctrl-C."""
    from dsv4_operator.cli import diagnostics

    return diagnostics.show_dashboard(target.source(), name, group)


@app.command()
@with_target_options
def logs(
    target: CommandTarget,
    name_or_rank: Annotated[str | None, _name_argument(" Then the rank comes first.")] = None,
    rank: Annotated[str | None, typer.Argument(metavar="RANK", help="Rank of a member; default: all members.")] = None,
    name: Annotated[str | None, typer.Option("--name", hidden=True)] = None,
    component: Annotated[
        str, typer.Option("--component", "-c", metavar="agent|ray|vllm|loop|all", help="Component.")
    ] = "all",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new lines.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, metavar="N", help="Last N lines of each file.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Lines newer than this duration, such as 10m; clusters only.")
    ] = None,
    output: FormatOption = None,
) -> int:
    """Show the logs of the members, or with `-c loop` those of the control loop."""
    from dsv4_operator.cli.logs import LogComponent, LogOptions

    if component not in list(LogComponent):
        raise bad_input(f"--component {component!r} is unknown; use one of {', '.join(LogComponent)}")
    if rank is None and name_or_rank is not None and name_or_rank.isdecimal():
        # Names begin with a letter.
        name_or_rank, rank = None, name_or_rank
    if rank is not None and not rank.isdecimal():
        raise bad_input(f"RANK {rank!r} is not a number; use the rank of a member, such as 0")
    if since is not None and (component == LogComponent.LOOP or not target.is_cluster):
        raise bad_input("--since is for the members' logs in a cluster; use --tail")
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    options = LogOptions(
        None if rank is None else int(rank), LogComponent(component), follow, tail, output, colour, since
    )
    return target.source().logs(name_or_rank or name, options)


@app.command()
@with_target_options
def why(
    target: CommandTarget,
    name: NameArgument = None,
    output: FormatOption = None,
    log: Annotated[
        list[str] | None,
        typer.Option("--log", metavar="FILE", help="Analyse a log of vLLM, Ray or NCCL of any run; may be repeated."),
    ] = None,
) -> int:
    """Show the last failure, its cause and the recovery."""
    from dsv4_operator.cli import status as command

    if log:
        if name is not None:
            raise bad_input(f"{name}: --log analyses files and no deployment; leave the name out")
        return command.show_why_of_logs(log, output)
    return command.show_why(target.source(), name, output)


@app.command()
@with_target_options
def kernels(target: CommandTarget, name: NameArgument = None, output: FormatOption = None) -> int:
    """Show the provider of each operation of a layer, with the reason."""
    from dsv4_operator.cli import status as command

    return command.show_kernels(target.source(), name, output)


@app.command()
@with_target_options
def evidence(
    target: CommandTarget,
    name: NameArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="[default: NAME-evidence-TIME.tar.gz]"),
    ] = None,
) -> int:
    """Write logs, status and evidence of failures to a .tar.gz file."""
    from dsv4_operator.cli import diagnostics

    return diagnostics.pack_evidence(target.source(), name, output)


@app.command()
@with_target_options
def restart(target: CommandTarget, name: NameArgument = None) -> int:
    """Restart all groups of a deployment on a cluster."""
    source = target.source()
    print_line(source.restart(source.get(name)))
    return ExitCode.OK


@app.command()
@with_target_options
def suspend(target: CommandTarget, name: NameArgument = None) -> int:
    """Stop a deployment on a cluster and keep its weights."""
    source = target.source()
    print_line(source.suspend(source.get(name), True))
    return ExitCode.OK


@app.command()
@with_target_options
def resume(target: CommandTarget, name: NameArgument = None) -> int:
    """Start a suspended deployment."""
    source = target.source()
    print_line(source.suspend(source.get(name), False))
    return ExitCode.OK


@app.command()
@with_target_options
def plan(
    target: CommandTarget,
    file_or_name: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A DSV4Deployment as YAML or JSON; - is stdin. On a cluster also the name of a deployment.",
            autocompletion=deployment_names,
        ),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Plan with a field below spec changed, such as engine.maxNumBatchedTokens=4096; may be repeated.",
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Machine of the catalog, such as gb10-64gb."),
    ] = None,
    from_log: Annotated[
        str | None,
        typer.Option(metavar="LOG", help="Compare the plan with a vLLM log of a start."),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="TERM", help="Show the logged starts behind a figure, such as kv."),
    ] = None,
    output: FormatOption = None,
) -> int:
    """Show the memory plan of a deployment. Starts and writes nothing."""
    from dsv4_operator.cli import plan as command

    if explain is not None:
        return command.explain(explain, output)
    if file_or_name is None:
        raise bad_input("FILE is required; add a file, or use --explain TERM")
    return command.show(
        target.source(), file_or_name, changes=what_if or (), machine_id=machine, form=output, log_file=from_log
    )


@app.command()
def doctor(
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Also test the path to a machine that runs the same command at the same time; may be repeated.",
        ),
    ] = None,
    wait: Annotated[str, typer.Option(metavar="DURATION", help="Timeout for --peer.")] = "30s",
    mtu: Annotated[
        int | None,
        typer.Option(min=576, max=65_535, metavar="BYTES", help="Packet size that every path must support."),
    ] = None,
    require_rdma: Annotated[
        bool, typer.Option("--require-rdma", help="Fail without RDMA, also without a connected cable.")
    ] = False,
    output: FormatOption = None,
) -> int:
    """Check the network of this machine and show remedies."""
    from ipaddress import AddressValueError, IPv4Address

    from dsv4_operator.cli import diagnostics

    for address in peer or ():
        try:
            IPv4Address(address)
        except AddressValueError as error:
            raise bad_input(
                f"--peer {address!r} is not an IPv4 address ({error}); use the address of the other machine"
            ) from None
    seconds = _duration("--wait", wait)
    return diagnostics.check_machine(peer or (), seconds, mtu=mtu, require_rdma=require_rdma, form=output)


@app.command()
def version(output: FormatOption = None) -> int:
    """Show the version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        number = installed("dsv4")
    except PackageNotFoundError:
        number = "unknown"
    print_line(f"dsv4 {number}" if output is None else render_document({"version": number}, output))
    return ExitCode.OK


def _duration(option: str, text: str) -> float:
    from dsv4_operator.api.values import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise bad_input(f"{option}: {error}") from None
    if seconds <= 0:
        raise bad_input(f"{option}: {text!r} is not a positive duration; write for example 10m")
    return seconds
