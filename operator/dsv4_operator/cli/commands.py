"""Command line of `dsv4`: commands, options and help. The implementation of a command is imported when it runs."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dsv4_operator.cli.output import KUBECTL_PLUGIN, ExitCode, TableFormat, bad_input, note, print_line, render_document
from dsv4_operator.cli.sources import (
    CommandTarget,
    FileArgument,
    FormatOption,
    NameArgument,
    deployment_names,
    name_argument,
    with_state_dir_option,
    with_target_options,
)


class _Commands(TyperGroup):
    """Commands, of which some have names of two words."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and the rest of the command line."""
        if (command := self.get_command(ctx, " ".join(args[:2]))) is not None and len(args) > 1:
            return command.name, command, args[2:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="dsv4",
    cls=_Commands,
    help="Run DeepSeek-V4 and keep it running.",
    epilog="Exit codes: 0 all went well; 1 it failed; 2 the input or the machine's state is not right for it; "
    "3 a plan is uncertain, or a verification or measurement incomplete; 130 interrupted. "
    "Colours only on a terminal, and not with NO_COLOR set.",
    # Completion of `kubectl dsv4` is configured in kubectl.
    add_completion=Path(sys.argv[0]).name != KUBECTL_PLUGIN,
    pretty_exceptions_enable=False,
    # Plain help: importing the formatter would take longer than the rest of `dsv4 --help`.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Timeout of the start, for example 90s [default: 10m with the Nano model, else 48h; at most "
            "spec.rollout.progressDeadline for an upgrade with --hosts; steps of a start have limits of their own].",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="FILE|NAME,NAME",
            help="Start it on other machines: an inventory, or ssh names. It keeps running.",
        ),
    ] = None,
) -> int:
    """Start a deployment on this machine, or with --hosts on others, and keep it running. Ctrl-C ends it here."""
    root = target.local_root("starts a deployment", "kubectl apply -f FILE")
    limit = None if timeout is None else _duration("--timeout", timeout)
    if hosts is not None:
        from dsv4_operator.cli import hosts as several

        return several.up(file, hosts, root, timeout=limit)
    from dsv4_operator.cli import up as command

    return command.run(file, root, detach=detach, timeout=limit)


@app.command()
@with_state_dir_option
def init(
    target: CommandTarget,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Machines, as in `ssh NAME`; empty: this machine. Default: ask."),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the deployment.")] = None,
    model: Annotated[str | None, typer.Option(metavar="CHECKPOINT", help="Such as V4-Flash-0731.")] = None,
    build: Annotated[str | None, typer.Option(metavar="PROFILE", help="Build of vLLM, such as vllm-0.33.")] = None,
    users: Annotated[int | None, typer.Option(min=1, max=512, metavar="N", help="Concurrent requests.")] = None,
    context: Annotated[int | None, typer.Option(min=128, metavar="TOKENS", help="Tokens of a request.")] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="hub|DIR", help="Source: the hub, or a directory that every machine has.")
    ] = None,
    listen: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address of the API.")] = None,
    directory: Annotated[Path, typer.Option(metavar="DIR", help="Directory for the files.")] = Path(),
    measure: Annotated[bool, typer.Option(help="Measure the bandwidth between the machines.")] = True,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Accept all defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> int:
    """Discover machines over ssh, and write dsv4.yaml and hosts.yaml. Changes no machine."""
    from dsv4_operator.cli import init as command

    root = target.local_root("discovers machines", "kubectl apply -f FILE")
    given = None if hosts is None else command.split_hosts(hosts)
    if given is None and yes:
        given = ()
    options = command.InitOptions(
        given, name, model, build, users, context, weights, listen, yes=yes, force=force, measure=measure
    )
    return command.run(options, directory, root)


@app.command()
@with_state_dir_option
def down(
    target: CommandTarget,
    name: NameArgument = None,
    all_deployments: Annotated[bool, typer.Option("--all", help="Stop all deployments of this machine.")] = False,
    purge: Annotated[
        bool, typer.Option("--purge", help="Also remove its logs, evidence and status (never the weights).")
    ] = False,
) -> int:
    """Stop a deployment, also one that `up --hosts` started; no error if it is not running."""
    root = target.local_root("ends a deployment", f"kubectl delete dsv4 {name or 'NAME'}")
    from dsv4_operator.cli import up as command

    if all_deployments and name:
        raise bad_input(f"--all and the name {name!r} are mutually exclusive; use one of them")
    if not all_deployments and (root / "remote").is_dir():
        from dsv4_operator.cli import hosts

        if record := hosts.find(root, name):
            if purge:
                raise bad_input(
                    f"--purge: {record.name} is on other machines; `dsv4 uninstall {record.name}` removes it"
                )
            return hosts.down(root, record, uninstall=False)
    if all_deployments and (root / "remote").is_dir():
        from dsv4_operator.cli import hosts

        for record in hosts.elsewhere(root):
            note(f"{record.name} is on other machines and is not ended; `dsv4 down {record.name}` ends it")
    return command.down(root, name, all_deployments=all_deployments, purge=purge)


@app.command()
@with_state_dir_option
def uninstall(target: CommandTarget, name: NameArgument = None) -> int:
    """Stop a deployment on other machines, and remove what `up --hosts` installed there (never the weights)."""
    from dsv4_operator.cli import hosts

    root = target.state_root()
    if (record := hosts.find(root, name)) is None:
        remedy = "for one of this machine, run `dsv4 down NAME --purge`"
        raise bad_input(f"no deployment {name or ''} on other machines is known under {root}; {remedy}")
    return hosts.down(root, record, uninstall=True)


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
    from dsv4_operator.cli import diagnostics

    if all_namespaces and name:
        raise bad_input(f"--all-namespaces and the name {name!r} are mutually exclusive; use one of them")
    source = replace(target, cluster=target.cluster or all_namespaces).source()
    return diagnostics.show(source, name, output, watch=watch, all_namespaces=all_namespaces)


@app.command()
@with_target_options
def chat(
    target: CommandTarget,
    name: Annotated[str | None, name_argument(" Then the prompt comes first.")] = None,
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
def connect(
    target: CommandTarget,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME|FILE", help="The deployment, or its file.", autocompletion=deployment_names),
    ] = None,
    client: Annotated[str, typer.Option(metavar="all|claude|openai|webui", help="Client.")] = "all",
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Write ~/.claude/settings.json and ./dsv4.env, with backups, instead of printing."
        ),
    ] = False,
) -> int:
    """Show the settings of Claude Code, OpenAI clients and Open WebUI, with the API key."""
    from dsv4_operator.cli import chat

    if client not in list(chat.Client):
        raise bad_input(f"--client {client!r} is unknown; use one of {', '.join(chat.Client)}")
    # A file has the address on every machine.
    record = None if name and Path(name).is_file() else target.elsewhere(name)
    return chat.connect(target.source(), name, chat.Client(client), target.state_root(), record, write=write)


@app.command()
@with_target_options
def verify(
    target: CommandTarget,
    name: NameArgument = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Verify this OpenAI-compatible endpoint instead of a deployment."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model of --url [default: the first that it lists].")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the API key of --url.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only the most important checks, within 60 s.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CHECK", help="A group or a check, such as tools; may be repeated.")
    ] = None,
    weak: Annotated[
        bool, typer.Option("--weak", help="The model is a test model: skip checks that need answers with a meaning.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the endpoint's log-probabilities as a reference.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare log-probabilities with a reference.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="URL", help="Compare log-probabilities and tokens with another endpoint.")
    ] = None,
    against_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the API key of --against.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, metavar="NATS", help="Mean difference allowed in comparisons.")
    ] = 0.05,
    accuracy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK[:METRIC]=MINIMUM",
            help="Evaluate a task with lm-eval, such as gsm8k=0.9 or dsv4_arithmetic=0.9; may be repeated.",
        ),
    ] = None,
    questions: Annotated[
        int, typer.Option(min=1, metavar="N", help="Questions of each task of --accuracy, at most.")
    ] = 200,
    tasks: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory with further task files of lm-eval.")
    ] = None,
    python: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Python that has lm-eval, for --accuracy.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save results in this file, and skip checks that it has.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JUnit XML report.")] = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Timeout of one request.")] = "5m",
    limit: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Timeout of the run [default: 1h, with --quick 60s].")
    ] = None,
    output: FormatOption = None,
) -> int:
    """Check the output of a model: API, content, tool calls, log-probabilities, long context."""
    from dsv4_operator.cli import verify as command
    from dsv4_operator.verify.endpoint import Address

    _only_one_endpoint(name, url, model, key_file)
    if reference is not None and against is not None:
        raise bad_input("--reference and --against are mutually exclusive; use one of them")
    if against is None and against_key_file is not None:
        raise bad_input("--against-key-file needs --against")
    if not accuracy and (tasks is not None or python is not None):
        raise bad_input(f"{'--tasks' if tasks is not None else '--python'} needs --accuracy")
    other = None
    if against is not None:
        other = Address(command.base_url("--against", against), "", command.read_key(against_key_file))
    options = command.VerifyOptions(
        quick=quick,
        weak=weak,
        only=tuple(only or ()),
        export=export,
        reference=reference,
        against=other,
        tolerance=tolerance,
        accuracy=tuple(command.parse_accuracy(each) for each in accuracy or ()),
        questions=questions,
        tasks=tasks,
        python=python,
        resume=resume,
        junit=junit,
        form=output,
        request_seconds=_duration("--timeout", timeout),
        total_seconds=None if limit is None else _duration("--limit", limit),
    )
    if url is None:
        return command.run(target.source(), name, options)
    address = Address(command.base_url("--url", url), model or "", command.read_key(key_file))
    return command.verify(address, options, weak=weak)


@app.command()
@with_target_options
def bench(
    target: CommandTarget,
    name: NameArgument = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Measure this OpenAI-compatible endpoint instead of a deployment."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model of --url [default: the first that it lists].")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="File with the API key of --url.")] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="chat, agent, rag, prefill or users; may be repeated [default: all]."),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Clients at the same time, such as 1,2,4 [default: the profile's]."),
    ] = None,
    input_lengths: Annotated[
        str | None,
        typer.Option("--input", metavar="N,N", help="Input tokens, such as 4096,65536 [default: the profile's]."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Repetitions of each row.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="One short row of the profile chat.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the prompts.")] = 0,
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save every row in this file, and skip rows that it has.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL",
            help="Compare with a stored run, or with another endpoint in alternation; fails if this one is slower.",
        ),
    ] = None,
    against_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the API key of --against URL.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0.0, max=10.0, metavar="SHARE", help="Slowdown that fails --against.")
    ] = 0.05,
    python: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Python that has vLLM, for its load generator.")
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Timeout of one request.")] = "5m",
    limit: Annotated[str, typer.Option(metavar="DURATION", help="Timeout of the run.")] = "4h",
    output: FormatOption = None,
) -> int:
    """Measure the speed of a model: throughput, latencies, acceptance of drafts."""
    from dsv4_operator.cli import bench as command
    from dsv4_operator.cli.verify import base_url, read_key
    from dsv4_operator.verify.endpoint import Address

    _only_one_endpoint(name, url, model, key_file)
    is_url = against is not None and against.startswith(("http://", "https://"))
    if against_key_file is not None and not is_url:
        raise bad_input("--against-key-file needs --against URL")
    compared: Path | Address | None = None if against is None else Path(against)
    if against is not None and is_url:
        compared = Address(base_url("--against", against), "", read_key(against_key_file))
    options = command.BenchOptions(
        profiles=tuple(profile or ()),
        concurrency=command.positive_numbers("--concurrency", concurrency),
        contexts=command.positive_numbers("--input", input_lengths),
        repeat=repeat,
        quick=quick,
        seed=seed,
        python=python,
        resume=resume,
        against=compared,
        threshold=threshold,
        form=output,
        request_seconds=_duration("--timeout", timeout),
        total_seconds=_duration("--limit", limit),
    )
    if url is None:
        return command.run(target.source(), name, options)
    return command.bench(Address(base_url("--url", url), model or "", read_key(key_file)), options)


@app.command("bench recovery")
@with_target_options
def bench_recovery(
    target: CommandTarget,
    name: NameArgument = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="kill-engine, stop-engine, kill-worker, stop-worker or kill-api; may be repeated "
            "[default: the first two].",
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, max=50, metavar="N", help="Repetitions of each fault.")] = 2,
    clients: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="Clients at the same time.")] = 4,
    group: Annotated[int, typer.Option(min=0, metavar="N", help="Group number.")] = 0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of prompts and moments.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask: the engine breaks while it serves.")] = False,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="Timeout of one request.")] = "15m",
    recovery: Annotated[str, typer.Option(metavar="DURATION", help="Timeout of one recovery.")] = "30m",
    limit: Annotated[str, typer.Option(metavar="DURATION", help="Timeout of the run.")] = "4h",
    output: FormatOption = None,
) -> int:
    """Kill and stop the engine of a running deployment under load: detection, recovery, lost requests."""
    from dsv4_operator.cli import recovery as command

    options = command.RecoveryOptions(
        faults=tuple(fault or ()),
        repeat=repeat,
        clients=clients,
        group=group,
        seed=seed,
        yes=yes,
        form=output,
        request_seconds=_duration("--timeout", timeout),
        recovery_seconds=_duration("--recovery", recovery),
        total_seconds=_duration("--limit", limit),
    )
    return command.run(target.source(), name, options)


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
    name_or_rank: Annotated[str | None, name_argument(" Then the rank comes first.")] = None,
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
    from dsv4_operator.cli.output import LogComponent, LogOptions

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
    start: Annotated[bool, typer.Option("--start", help="Show the duration of each step of the latest start.")] = False,
) -> int:
    """Show the last failure, its cause and the recovery."""
    from dsv4_operator.cli import diagnostics

    if log:
        if name is not None:
            raise bad_input(f"{name}: --log analyses files and no deployment; leave the name out")
        if start:
            raise bad_input("--start is for deployments; leave it out with --log")
        return diagnostics.show_why_of_logs(log, output)
    if start:
        return diagnostics.show_start(target.source(), name, output)
    return diagnostics.show_why(target.source(), name, output)


@app.command()
@with_target_options
def kernels(target: CommandTarget, name: NameArgument = None, output: FormatOption = None) -> int:
    """Show the provider of each operation of a layer, with the reason."""
    from dsv4_operator.cli import diagnostics

    return diagnostics.show_kernels(target.source(), name, output)


@app.command("kernels compile")
@with_state_dir_option
def kernels_compile(
    target: CommandTarget,
    file: Annotated[
        str, typer.Argument(metavar="FILE|DIR", help="A DSV4Deployment, or the directory of a checkpoint.")
    ],
    arch: Annotated[
        str | None, typer.Option(metavar="ARCH,ARCH", help="Architectures; default: that of the deployment's hardware.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: where engines of this Python look for them.")
    ] = None,
    include: Annotated[
        list[Path] | None,
        typer.Option(metavar="CACHE", help="Add the kernels of a Triton cache of an engine; may be repeated."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Concurrent compilers; default: half of the processors.")
    ] = None,
) -> int:
    """Compile the kernels of an engine ahead of its first start, without a GPU."""
    from dsv4_operator.cli import plan as command

    return command.compile_kernels(
        target.source(), file, arch=arch, out=out, include=include or (), processes=processes
    )


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
def report(
    target: CommandTarget,
    name: NameArgument = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="FILE", help="Further reports, with --merge.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE.html", help="[default: dsv4-report-TIME.html; not with -o]"),
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Add the results of `dsv4 verify -o json`.")
    ] = None,
    bench: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Add the results of `dsv4 bench -o json`.")
    ] = None,
    recovery: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Add the results of `dsv4 bench recovery -o json`.")
    ] = None,
    must_gather: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.tar.gz",
            help="Write the report with objects, events, agent status, logs and evidence; has names and addresses.",
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Compare the reports in the given JSON files; no deployment is read.")
    ] = False,
    output: FormatOption = None,
) -> int:
    """Write a report to share as HTML and JSON: machine, memory, kernels, results, failures; no names or addresses."""
    from dsv4_operator.cli import report as command

    options = command.ReportOptions(file, verify, bench, recovery, must_gather, output)
    if merge:
        return command.merge([*([name] if name else []), *(more or ())], options)
    if more:
        raise bad_input(f"{more[0]!r}: one deployment has one report; add --merge to compare JSON files")
    return command.run(target.source(), name, options, local=not target.is_cluster)


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
    write_build: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --from-log: write the build of the log for spec.engine.build."),
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="Read sizes from the headers of the files in spec.model.source.huggingFace.")
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(metavar="TERM", help="Show the logged starts behind a figure, such as kv."),
    ] = None,
    output: FormatOption = None,
) -> int:
    """Show the memory plan of a deployment. Starts nothing, and writes only the file of --write-build."""
    if explain is not None:
        from dsv4_operator.cli import logged

        return logged.explain(explain, output)
    from dsv4_operator.cli import plan as command

    if file_or_name is None:
        raise bad_input("FILE is required; add a file, or use --explain TERM")
    if write_build is not None and from_log is None:
        raise bad_input(f"--write-build {write_build!r} needs a log; add --from-log LOG")
    return command.show(
        target.source(),
        file_or_name,
        changes=what_if or (),
        machine_id=machine,
        form=output,
        log_file=from_log,
        build_file=write_build,
        hub=hub,
    )


@app.command()
def doctor(
    reports: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[REPORT]...",
            help="Files NODE.json with the output of `doctor --peer ADDRESS -o json` on each node of a cluster: check "
            "nothing here, and print the commands that label the nodes with those that they reach.",
            show_default=False,
        ),
    ] = None,
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
    copies: Annotated[
        bool, typer.Option("--copies/--no-copies", help="Test copies between the GPUs of this machine over PCIe.")
    ] = True,
    output: FormatOption = None,
) -> int:
    """Check the network of this machine, and copies between its GPUs, and show remedies."""
    from ipaddress import AddressValueError, IPv4Address

    from dsv4_operator.backends.local.state import default_root
    from dsv4_operator.cli import diagnostics

    for address in peer or ():
        try:
            IPv4Address(address)
        except AddressValueError as error:
            raise bad_input(
                f"--peer {address!r} is not an IPv4 address ({error}); use the address of the other machine"
            ) from None
    seconds = _duration("--wait", wait)
    if reports:
        if peer:
            raise bad_input("--peer and reports are mutually exclusive; give one of them")
        return diagnostics.label_nodes(reports, output)
    return diagnostics.check_machine(
        peer or (), seconds, mtu=mtu, require_rdma=require_rdma, copies=copies, form=output, root=default_root()
    )


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


def _only_one_endpoint(name: str | None, url: str | None, model: str | None, key_file: Path | None) -> None:
    """Check the options of a command that uses a deployment or an endpoint."""
    if url is not None and name is not None:
        raise bad_input(f"--url and the name {name!r} are mutually exclusive; use one of them")
    if url is None and (model is not None or key_file is not None):
        raise bad_input(f"{'--model' if model is not None else '--key-file'} needs --url; a deployment has its own")


def _duration(option: str, text: str) -> float:
    from dsv4_operator.api.values import parse_duration

    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise bad_input(f"{option}: {error}") from None
    if seconds <= 0:
        raise bad_input(f"{option}: {text!r} is not a positive duration; write for example 10m")
    return seconds
