"""`dsv4 init`: discover machines over ssh, choose link and model, and write `dsv4.yaml` and `hosts.yaml`.

No machine is changed. Files are written after the confirmation of a summary.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import typer
import yaml

from dsv4_operator.api import Finding, InvalidDeployment, Severity, parse
from dsv4_operator.api.deployment import NAME_PATTERN
from dsv4_operator.api.spec import LOOPBACK
from dsv4_operator.backends.hosts.documents import STATE_DIRECTORY, InvalidInventory, load_inventory
from dsv4_operator.backends.hosts.ssh import (
    Completed,
    NotMeasured,
    Place,
    Ssh,
    SshError,
    connections,
    rdma_bandwidth,
    tcp_bandwidth,
)
from dsv4_operator.backends.hosts.survey import (
    PROGRAM,
    SURVEY_SECONDS,
    Link,
    MachineNetwork,
    Survey,
    SurveyError,
    common_links,
    disk_finding,
    is_ring,
    link_findings,
    machine_findings,
    no_link,
    parse_survey,
    read_network,
    spare_links,
)
from dsv4_operator.backends.local.state import DeploymentState, StateError
from dsv4_operator.cli.diagnostics import check_copy
from dsv4_operator.cli.output import ExitCode, bad_input, convert_os_errors, note, print_line, render_table
from dsv4_operator.cli.sources.local import state_dir_option
from dsv4_operator.planning.catalog import GIB, checkpoint_named, machine_named
from dsv4_operator.planning.offers import NANO_SOURCE, USERS, Offer, document, offers
from dsv4_runtime.util.files import replace_file

MANIFEST, INVENTORY = "dsv4.yaml", "hosts.yaml"
HERE = "this machine"
KEY_FILE = "keys"
"""Key of the Secret with the API keys."""
_SOFTWARE_BYTES = 20 * GIB
_HUB = "https://huggingface.co"
_HUB_SECONDS = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PREFERRED = "V4-Flash-0731"
_ENOUGH_GBITS = 4.0
"""Expected bandwidth of one TCP stream on a fast link; python3 sends at most some 20 Gbit/s."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class InitOptions:
    """Answers given as options; None: ask, or the default with `yes`."""

    hosts: tuple[str, ...] | None = None
    """Targets for ssh; empty: this machine."""
    name: str | None = None
    model: str | None = None
    """Checkpoint of the catalog."""
    build: str | None = None
    users: int | None = None
    context: int | None = None
    weights: str | None = None
    """Directory on every machine, or `hub`."""
    listen: str | None = None
    yes: bool = False
    force: bool = False
    """Replace existing files."""
    measure: bool = True
    """Measure the bandwidth of the link."""


@dataclass(frozen=True, slots=True)
class _Found:
    """One machine."""

    name: str
    target: str | None
    """For ssh; None: this machine."""
    survey: Survey
    offset: tuple[float, float]
    """Of its clock in seconds, and the uncertainty."""


class _Prompts:
    """Questions with defaults, which `--yes` accepts."""

    def __init__(self, *, yes: bool) -> None:
        if not yes and not sys.stdin.isatty():
            raise bad_input("stdin is not a terminal; add --yes to accept the defaults")
        self._yes = yes

    def ask(self, question: str, default: str, read: Callable[[str], _T]) -> _T:
        """Return the answer converted by `read`, which raises ValueError for an invalid one."""
        if self._yes:
            return read(default)
        while True:
            answer = str(typer.prompt(question, default=default, err=True))
            try:
                return read(answer.strip())
            except ValueError as error:
                note(str(error))

    def choose(self, option: str, given: object, question: str, default: str, read: Callable[[str], _T]) -> _T:
        """Return the value `given` as an option, or else the answer.

        Raises:
            CommandError: the option is invalid.
        """
        if given is None:
            return self.ask(question, default, read)
        try:
            return read(str(given))
        except ValueError as error:
            raise bad_input(f"{option}: {error}") from None

    def confirm(self, question: str) -> bool:
        """Return the answer; true with `--yes`."""
        return self._yes or bool(typer.confirm(question, default=True, err=True))


def run(options: InitOptions, folder: Path, root: Path, *, ssh_options: Sequence[str] = ()) -> ExitCode:
    """Discover, ask, confirm and write.

    Args:
        options: answers given in advance.
        folder: directory for the files.
        root: state directory of this machine, for the API key.
        ssh_options: further arguments for ssh.

    Raises:
        CommandError: a machine cannot be reached or is unsuitable; all machines are reported.
    """
    prompts = _Prompts(yes=options.yes)
    targets = options.hosts
    if targets is None:
        question = "Machines, as in `ssh NAME` (separated by commas; empty: this machine)"
        targets = prompts.ask(question, "", split_hosts)
    names = host_names(targets)
    _check_files(folder, names, force=options.force)
    with tempfile.TemporaryDirectory(prefix="dsv4-") as scratch:
        return asyncio.run(_run(options, prompts, names, folder, root, Path(scratch), ssh_options))


async def _run(
    options: InitOptions,
    prompts: _Prompts,
    names: Mapping[str, str],
    folder: Path,
    root: Path,
    scratch: Path,
    ssh_options: Sequence[str],
) -> ExitCode:
    async with connections(options=ssh_options) as ssh:
        found = await _survey(ssh, names, root)
        print_line(render_table(["MACHINE", "GPU", "MEMORY", "CPUS", "SYSTEM", "DISK FREE"], [*map(_row, found)]))
        networks = [_network(one, scratch) for one in found]
        surveys = {one.name: one.survey for one in found}
        problems = list(machine_findings(surveys, {one.name: one.offset for one in found}, several=bool(names)))
        for network in networks:
            problems += network.problems
        link = None
        if len(found) > 1:
            link, more = await _link(ssh, found, networks, measure=options.measure)
            problems += more
        elif names:
            # The address of the host service, on the network that the API uses too.
            links = sorted(common_links(networks), key=lambda each: not each.ends[found[0].name].default_route)
            link = links[0] if links else None
            problems += [] if links else [no_link(networks)]
        _report(problems)
    return _choose(options, prompts, found, link, networks, folder, root)


def split_hosts(text: str) -> tuple[str, ...]:
    """Return the targets in a list separated by commas or blanks."""
    return tuple(word for word in re.split(r"[,\s]+", text) if word)


def host_names(targets: Sequence[str]) -> dict[str, str]:
    """Return the targets by the names of their machines, which are those of the targets without the user.

    Raises:
        CommandError: a target is invalid, or two have one name. Contains all problems.
    """
    names = [re.sub(r"[^a-z0-9.-]+", "-", target.rpartition("@")[2].lower()).strip("-.") for target in targets]
    hosts = [
        {"name": name, "ssh": target, "address": f"192.0.2.{number % 250 + 1}"}
        for number, (name, target) in enumerate(zip(names, targets, strict=True))
    ]
    if hosts:
        try:
            load_inventory(json.dumps({"hosts": hosts}))
        except InvalidInventory as error:
            raise bad_input(*(f"--hosts: {finding}" for finding in error.findings), findings=error.findings) from None
    return dict(zip(names, targets, strict=True))


def _check_files(folder: Path, names: Mapping[str, str], *, force: bool) -> None:
    if not folder.is_dir():
        raise bad_input(f"--directory {str(folder)!r} is not a directory; create it")
    existing = [name for name in (MANIFEST, *([INVENTORY] if names else [])) if (folder / name).exists()]
    if existing and not force:
        raise bad_input(f"{folder / existing[0]} exists; add --force to replace it, or choose another --directory")


async def _survey(ssh: Ssh, names: Mapping[str, str], root: Path) -> list[_Found]:
    """Return the facts of all machines, of this one without names.

    Raises:
        CommandError: a machine does not answer; contains one message for each.
    """
    if not names:
        try:
            return [await _survey_one(_run_here, HERE, None, str(root))]
        except SurveyError as error:
            raise bad_input(f"{HERE}: {error}") from None

    async def there(name: str, target: str) -> _Found | str:
        try:
            return await _survey_one(ssh.run, name, target, STATE_DIRECTORY)
        except (SshError, SurveyError) as error:
            text = str(error)
            return text if text.startswith(f"{target}: ") else f"{target}: {text}"

    answers = await asyncio.gather(*(there(name, target) for name, target in names.items()))
    if failed := [answer for answer in answers if isinstance(answer, str)]:
        raise bad_input(*failed)
    return [answer for answer in answers if not isinstance(answer, str)]


async def _survey_one(run: Callable[..., Any], name: str, target: str | None, data: str) -> _Found:
    begun, tick = time.time(), time.monotonic()
    words = ["sh", "-s", "--", "/", data]
    done: Completed = await run(target or name, words, seconds=SURVEY_SECONDS, given=PROGRAM.encode())
    seconds = time.monotonic() - tick
    survey = parse_survey(done.output.decode(errors="replace"))
    # The program reads the clock at some moment of the call.
    return _Found(name, target, survey, (survey.time - begun - seconds / 2, seconds / 2))


async def _run_here(target: str, words: Sequence[str], *, seconds: float, given: bytes) -> Completed:
    try:
        done = await asyncio.to_thread(
            lambda: subprocess.run(words, input=given, capture_output=True, timeout=seconds, check=False)
        )
    except subprocess.TimeoutExpired:
        raise SurveyError(f"the facts of {target} were not complete within {seconds:g} s") from None
    return Completed(done.returncode, done.stdout, done.stderr.decode(errors="replace"))


def _row(found: _Found) -> list[str]:
    survey = found.survey
    kinds = [gpu.name.removeprefix("NVIDIA ") for gpu in survey.gpus]
    gpus = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    return [
        found.name,
        f"{gpus}, driver {survey.driver}" if gpus else "none",
        f"{survey.memory_bytes / GIB:.0f} GiB",
        f"{survey.cpus} {survey.architecture}",
        survey.os,
        f"{survey.disk_free_bytes / GIB:.0f} GiB",
    ]


def _network(found: _Found, scratch: Path) -> MachineNetwork:
    copy = scratch / f"m-{found.name.replace(' ', '-')}"
    copy.mkdir()
    found.survey.write(copy)
    return read_network(found.name, check_copy(copy))


async def _link(
    ssh: Ssh, found: Sequence[_Found], networks: Sequence[MachineNetwork], *, measure: bool
) -> tuple[Link | None, list[Finding]]:
    """Print and return the best link, with its problems."""
    links = common_links(networks)
    if not links:
        return None, [no_link(networks)]
    link = links[0]
    print_line(f"\nlink        {link}")
    for name, end in link.ends.items():
        print_line(f"            {name} {end.address.ip} ({end.interface}{f', {end.hca}' if end.hca else ''})")
    for spare in spare_links(links, link):
        print_line(f"also        {spare}")
    if is_ring(networks):
        print_line("            the RDMA ports form a ring without a switch")
    gpus = any(one.survey.gpus for one in found)
    problems = list(link_findings(link, networks, fabric=gpus))
    if measure:
        problems += await _measure(ssh, found, link)
    return link, problems


async def _measure(ssh: Ssh, found: Sequence[_Found], link: Link) -> list[Finding]:
    """Print the bandwidth from each machine to the next one; return the problems."""
    problems = []
    places = [Place(one.name, one.target or "", link.ends[one.name], one.survey.tools) for one in found]
    for sender, receiver in zip(places, [*places[1:], places[0]], strict=True):
        path = f"{sender.name} to {receiver.name}"
        try:
            tcp = await tcp_bandwidth(ssh, sender, receiver)
        except NotMeasured as error:
            firewalls = {
                one.name: one.survey.firewalls
                for one in found
                if one.name in (sender.name, receiver.name) and one.survey.firewalls
            }
            problems.append(_blocked(path, str(error), link, firewalls))
            continue
        text = f"{path}: TCP {tcp:.1f} Gbit/s"
        try:
            rdma = await rdma_bandwidth(ssh, sender, receiver)
        except NotMeasured as error:
            remedy = "run `dsv4 doctor --peer ADDRESS` on both machines"
            problems.append(Finding(path, "RdmaFails", f"RDMA fails: {error}", remedy, severity=Severity.WARN))
        else:
            text += f", RDMA {rdma:.0f} Gbit/s" if rdma is not None else ""
        print_line(f"            {text}")
        if link.speed and tcp < min(_ENOUGH_GBITS, link.speed / 4000):
            message = f"carries {tcp:.1f} Gbit/s over a link of {link.speed / 1000:g} Gbit/s"
            remedy = "check the cable, the MTU, and other programs on the link"
            problems.append(Finding(path, "SlowLink", message, remedy, severity=Severity.WARN))
    return problems


def _blocked(path: str, error: str, link: Link, firewalls: Mapping[str, Sequence[str]]) -> Finding:
    remedy = "check the cable and the firewalls of both machines"
    commands = {
        "ufw": f"sudo ufw allow from {link.network}",
        "firewalld": f"sudo firewall-cmd --permanent --zone=trusted --add-source={link.network} (then --reload)",
    }
    if firewalls:
        shown = [f"`{commands[kind]}` on {name}" for name, kinds in firewalls.items() for kind in kinds]
        remedy = f"allow the network of the link: {', '.join(shown)}"
    return Finding(path, "LinkBlocked", f"no TCP stream of {link.network} arrives: {error}", remedy)


def _report(problems: Sequence[Finding]) -> None:
    """Print warnings.

    Raises:
        CommandError: there are refusals.
    """
    for finding in problems:
        if finding.severity is not Severity.REFUSE:
            note(f"warning: {finding}")
    refused = [finding for finding in problems if finding.severity is Severity.REFUSE]
    if refused:
        raise bad_input(*map(str, refused), findings=refused)


def _choose(
    options: InitOptions,
    prompts: _Prompts,
    found: Sequence[_Found],
    link: Link | None,
    networks: Sequence[MachineNetwork],
    folder: Path,
    root: Path,
) -> ExitCode:
    offer = _offer(options, prompts, found)
    gpus = bool(offer.machine.sm)
    users, context = options.users or USERS[1], options.context or offer.context
    if gpus:
        users = prompts.choose("--users", options.users, "Concurrent requests", str(USERS[1]), _positive)
        longest = max(offer.contexts.values())
        question = f"Tokens of a request, at most {longest:,}"
        context = prompts.choose("--context", options.context, question, str(offer.context), _at_most(longest))
    default = "flash" if gpus else "nano"
    name = prompts.choose("--name", options.name, "Name of the deployment", default, _name)
    state = _state(root, name)
    source = _source(options, prompts, found, offer) if gpus else dict(NANO_SOURCE)
    if gpus and "path" not in source:
        needed = offer.model.checkpoint_bytes + _SOFTWARE_BYTES
        _report([each for one in found if (each := disk_finding(one.name, one.survey, needed)) is not None])
    gateway, key = _gateway(options, prompts, networks if link else (), state)
    manifest = document(name, offer, source, users=users, context=context, gateway=gateway)
    try:
        parse(manifest)
    except InvalidDeployment as error:
        raise bad_input(*map(str, error.findings), findings=error.findings) from None
    inventory = _inventory(found, link) if link else None
    if inventory is not None:
        load_inventory(inventory)
    _print_summary(name, offer, users, context, source, gateway, key, found, folder, inventory is not None)
    if not prompts.confirm("Write these files?"):
        print_line("nothing was written")
        return ExitCode.FAILED
    with convert_os_errors("cannot write"):
        if key is not None and not key.exists():
            key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(key, f"sk-dsv4-{secrets.token_urlsafe(32)}\n")
        if inventory is not None:
            replace_file(folder / INVENTORY, inventory, mode=0o644)
        text = f"# Written by `dsv4 init`. Every field: docs/reference/api.md\n{_yaml(manifest)}"
        replace_file(folder / MANIFEST, text, mode=0o644)
    where = "" if folder.resolve() == Path.cwd() else f"{folder}/"
    hosts = f" --hosts {where}{INVENTORY}" if inventory is not None else ""
    print_line(f"\nStart it:   dsv4 up {where}{MANIFEST}{hosts}{state_dir_option(root)}")
    print_line(f"Then:       dsv4 chat {name}{state_dir_option(root)}")
    print_line(f"Clients:    dsv4 connect {where}{MANIFEST}{state_dir_option(root)}")
    return ExitCode.OK


def _offer(options: InitOptions, prompts: _Prompts, found: Sequence[_Found]) -> Offer:
    """Print the checkpoints that fit, and return the selected one with its build.

    Raises:
        CommandError: none fits, or an option is not among them.
    """
    kinds = [one.survey.machine for one in found]
    machine = min((kind for kind in kinds if kind), key=lambda kind: kind.memory_bytes, default=machine_named("cpu"))
    devices = min((one.survey.devices for one in found), default=1) or 1
    # Without others, two members of the Nano model share this machine.
    nodes = len(found) if machine.sm or found[0].target else 2
    if (count := nodes * devices) & (count - 1) and not machine.sm:
        raise bad_input(f"--hosts: {count} machines without GPUs; the Nano model can be divided between 1 or 2")
    fitting = offers(machine, nodes, devices)
    if not fitting:
        message = f"no checkpoint fits {nodes} × {machine.title} with {devices} GPU each"
        raise bad_input(f"{message}; add machines; `dsv4 plan FILE` shows the missing memory")
    usual = [offer for offer in fitting if offer.usual] or fitting
    if machine.sm:
        head = ["", "CHECKPOINT", "WEIGHTS", *(f"{users} AT ONCE" for users in USERS), "HERE"]
        rows = [
            [
                str(number),
                offer.model.name,
                f"{offer.model.checkpoint_bytes / 1e9:.0f} GB",
                *(f"{tokens:,}" for tokens in offer.contexts.values()),
                _common_checkpoint(found, offer) or "",
            ]
            for number, offer in enumerate(usual, start=1)
        ]
        print_line("\nCheckpoints that fit, with the greatest context of several requests at once:")
        print_line(render_table(head, rows))
    names = [offer.model.name for offer in usual]
    here = [offer.model.name for offer in usual if _common_checkpoint(found, offer)]
    default = here[0] if here else _PREFERRED if _PREFERRED in names else names[0]
    given = options.model if options.model is not None or len(names) > 1 else default
    model = prompts.choose("--model", given, "Checkpoint", default, _one_of(names))
    builds = [offer for offer in fitting if offer.model.name == model]
    titles = [offer.profile.name for offer in builds]
    build = options.build
    if build is None and len(builds) > 1:
        print_line("\nBuilds of vLLM for it:")
        contexts = [
            [each.profile.name, *(f"{tokens:,}" for tokens in each.contexts.values()), _speed(each)] for each in builds
        ]
        rows = [[str(number), *row] for number, row in enumerate(contexts, start=1)]
        print_line(render_table(["", "BUILD", *(f"{users} AT ONCE" for users in USERS), "PUBLISHED"], rows))
    elif build is None:
        build = titles[0]
    question = "Build; `dsv4 up` installs the first"
    build = prompts.choose("--build", build, question, titles[0], _one_of(titles))
    return next(offer for offer in builds if offer.profile.name == build)


def _speed(offer: Offer) -> str:
    """Return the published speed of a build on this kind of machine."""
    row = offer.published
    return row.speed if row else ""


def _common_checkpoint(found: Sequence[_Found], offer: Offer) -> str | None:
    """Return a directory that all machines have with the checkpoint."""
    common = set.intersection(*(set(one.survey.checkpoints) for one in found))
    return next((path for path in sorted(common) if checkpoint_named(path) == offer.model), None)


def _source(options: InitOptions, prompts: _Prompts, found: Sequence[_Found], offer: Offer) -> dict[str, Any]:
    """Return the source of the weights."""
    here = _common_checkpoint(found, offer)
    question = "Weights: `hub`, or a directory that every machine has"
    answer = prompts.choose("--weights", options.weights, question, here or "hub", _weights)
    if answer != "hub":
        return {"path": answer}
    return {"huggingFace": {"repo": offer.model.repo, "revision": _revision(offer.model.repo)}}


def _weights(text: str) -> str:
    if text == "hub" or text.startswith("/"):
        return text
    raise ValueError(f"{text!r} is neither `hub` nor an absolute path")


def _revision(repo: str) -> str:
    """Return the present commit of a repository, so that the weights cannot change.

    Raises:
        CommandError: the hub does not answer.
    """
    endpoint = os.environ.get("HF_ENDPOINT", _HUB).rstrip("/")
    url = f"{endpoint}/api/models/{urllib.parse.quote(repo)}/revision/main"
    if not endpoint.startswith(("https://", "http://")):
        raise bad_input(f"HF_ENDPOINT: {endpoint!r} is not a URL; write for example {_HUB}")
    request = urllib.request.Request(url)  # noqa: S310
    if token := os.environ.get("HF_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_HUB_SECONDS) as answer:  # noqa: S310
            commit = json.loads(answer.read(1 << 20))["sha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", None) or error
        remedy = "set HF_ENDPOINT to a mirror, or use --weights with a directory that every machine has"
        raise bad_input(f"the commit of {repo} cannot be read from {endpoint} ({reason}); {remedy}") from None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise bad_input(f"{endpoint} gives no commit of {repo}; use --weights with a directory that every machine has")
    return commit


def _gateway(
    options: InitOptions, prompts: _Prompts, networks: Sequence[MachineNetwork], state: DeploymentState
) -> tuple[dict[str, Any], Path | None]:
    """Return `spec.gateway`, and the file of the API key; none for this machine alone."""
    outside = networks[0].outside if networks else None
    default = str(outside.address.ip) if outside is not None else LOOPBACK
    if options.listen is not None:
        listen = options.listen
    elif networks:
        listen = prompts.ask(f"Address of the API on {networks[0].name} ({LOOPBACK}: only there)", default, str)
    else:
        listen = LOOPBACK
    if listen == LOOPBACK and not networks:
        return {}, None
    name = f"{state.name}-api"
    gateway: dict[str, Any] = {"apiKeys": {"secretKeyRef": {"name": name, "key": KEY_FILE}}}
    if listen != LOOPBACK:
        gateway["listen"] = listen
    return gateway, state.secrets / name / KEY_FILE


def _inventory(found: Sequence[_Found], link: Link) -> str:
    lines = ["# Written by `dsv4 init`. The loop and the gateways run on the first machine.", "hosts:"]
    for one in found:
        end, survey = link.ends[one.name], one.survey
        gpus = f"{len(survey.gpus)} × {survey.gpus[0].name}, driver {survey.driver}" if survey.gpus else "no GPU"
        lines.append(f"  # {gpus}, {survey.memory_bytes / GIB:.0f} GiB, {survey.os}")
        host = {"name": one.name}
        if one.target != one.name:
            host["ssh"] = one.target or ""
        host |= {"address": str(end.address.ip), "interface": end.interface}
        first, *rest = _yaml(host).splitlines()
        lines += [f"  - {first}", *(f"    {line}" for line in rest)]
    return "\n".join(lines) + "\n"


def _yaml(data: object) -> str:
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120))


def _print_summary(
    name: str,
    offer: Offer,
    users: int,
    context: int,
    source: Mapping[str, Any],
    gateway: Mapping[str, Any],
    key: Path | None,
    found: Sequence[_Found],
    folder: Path,
    several: bool,
) -> None:
    division, row = offer.division, offer.published
    layout = [f"tensor parallel {division.tensor}"] if division.tensor > 1 else []
    layout += [f"{division.stages} pipeline stages"] if division.stages > 1 else []
    one = "one GPU" if offer.machine.sm else "one process"
    concurrency = offer.concurrency(users, context)
    room = f", room for {concurrency:.1f} of {context:,} tokens at once" if concurrency is not None else ""
    hub = source.get("huggingFace")
    weights = f"{hub['repo']} at {hub['revision'][:12]}" if hub else source.get("path", "generated")
    files = [str(folder / MANIFEST), *([str(folder / INVENTORY)] if several else []), *([str(key)] if key else [])]
    listen = gateway.get("listen", LOOPBACK)
    lines = [
        ("deployment", name),
        ("model", f"{offer.model.name} on {', '.join(one.name for one in found)}, {', '.join(layout) or one}"),
        ("build", offer.profile.title),
        *([("settings", f"as published by {row.source}, {row.date}: {_words(offer.engine)}")] if row else []),
        ("weights", weights),
        *([("toolkit", _toolkits(found))] if len(found) > 1 and found[0].survey.needs_toolkit else []),
        ("requests", f"up to {users} at once, {context:,} tokens each at most{room}"),
        ("API", f"http://{listen}:8000/v1 of {found[0].name}, {'with a key' if key else 'without a key'}"),
        ("files", ", ".join(files)),
    ]
    print_line()
    for label, text in lines:
        print_line(f"{label:<12}{text}")
    if not offer.usual:
        note(f"warning: `dsv4 up` does not install {offer.profile.title}; install its vLLM on every machine before")


def _toolkits(found: Sequence[_Found]) -> str:
    """Return `CUDA 13.0 on spark-1, none on spark-2`."""
    machines: dict[str, list[str]] = {}
    for one in found:
        machines.setdefault(one.survey.cuda and f"CUDA {one.survey.cuda}", []).append(one.name)
    return ", ".join(f"{release or 'none'} on {' and '.join(names)}" for release, names in machines.items())


def _words(engine: Mapping[str, Any]) -> str:
    """Return the published settings in one line."""
    words = [f"{key} {value}" for key, value in engine.items() if not isinstance(value, dict | list)]
    if drafts := engine.get("speculative"):
        tokens = f" with {drafts['tokens']} tokens" if "tokens" in drafts else ""
        words.append(f"drafts of {drafts['method']}{tokens}")
    return ", ".join([*words, *(f"{one['name']}={one['value']}" for one in engine.get("env", ()))])


def _state(root: Path, name: str) -> DeploymentState:
    try:
        return DeploymentState(root, name)
    except StateError as error:
        raise bad_input(f"--name: {error}") from None


def _name(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise ValueError(f"{text!r} is not the name of a deployment; write for example flash")
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{text!r} is not a positive number")
    return int(text)


def _at_most(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if (number := _positive(text)) > most:
            raise ValueError(f"{number:,} tokens do not fit; write at most {most}")
        return number

    return read


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.isdecimal() and 1 <= int(text) <= len(names):
            return names[int(text) - 1]
        if text in names:
            return text
        raise ValueError(f"{text!r} is not one of {', '.join(names)}")

    return read
