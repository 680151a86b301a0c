"""`dsv4 report`: a deployment as one HTML page and as JSON that owners can share, and a comparison of several reports.

Collects the document, whose fields are in `report_fields`; `report_page` makes a page from it alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dsv4_operator.api import DSV4Deployment, GroupPhase, GroupStatus
from dsv4_operator.backends.local import gpus
from dsv4_operator.backends.local.facts import model_here
from dsv4_operator.cli import diagnostics
from dsv4_operator.cli.output import (
    CommandError,
    DocumentFormat,
    ExitCode,
    bad_input,
    convert_os_errors,
    note,
    print_line,
    render_document,
)
from dsv4_operator.cli.report_fields import (
    KIND,
    MOST_FAILURES,
    MOST_GROUPS,
    MOST_KERNEL_SETS,
    MOST_ROWS,
    OTHER,
    SCHEMA,
    SETTINGS,
    WARNINGS,
    BenchPart,
    BenchRun,
    CheckResult,
    ConditionPart,
    FabricCheck,
    FabricPart,
    FabricPort,
    FailurePart,
    Gpu,
    GroupFigure,
    GroupPart,
    KernelSet,
    MachinePart,
    MemoryPart,
    MemoryTerm,
    ModelPart,
    Operation,
    RecoveryPart,
    RecoveryRow,
    SettingPart,
    SetupReport,
    Standing,
    VerifyPart,
    VersionsPart,
    WarningPart,
)
from dsv4_operator.cli.report_page import compared, render_comparison, render_page, setup_title
from dsv4_operator.cli.sources.base import DeploymentSource, DeploymentView, EvidenceFile
from dsv4_operator.planning.catalog import Model, checkpoint_named, machine, machine_named, models
from dsv4_operator.planning.catalog.checkpoint import BadCheckpoint
from dsv4_operator.planning.images import ImageProfile, profile_for, profile_named
from dsv4_operator.planning.images.surface import read_arguments
from dsv4_operator.planning.memory import MemoryPlan, MemoryPool
from dsv4_operator.planning.setup import PlanRefused, setup
from dsv4_runtime.contract import KV_CACHE, KernelStatus

_INPUT_BYTES = 16 * 2**20
_DRIVER_SECONDS, _FABRIC_SECONDS = 2.0, 4.0
_COMMANDS = {"--verify": "verify", "--bench": "bench", "--recovery": "bench recovery", "--merge": "report"}
_LEAST_MERGED, _MOST_MERGED = 2, 32


@dataclass(frozen=True, slots=True)
class Here:
    """Findings about this machine; empty for a cluster."""

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    fabric: Mapping[str, Any] | None = None
    """Document of `dsv4 doctor`."""


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Options of `dsv4 report`."""

    file: Path | None = None
    verify: Path | None = None
    bench: Path | None = None
    recovery: Path | None = None
    gather: Path | None = None
    """Archive with the report and the evidence."""
    form: DocumentFormat | None = None


def run(source: DeploymentSource, name: str | None, options: ReportOptions, *, local: bool) -> ExitCode:
    """Write the report of a deployment as HTML and JSON, or print it.

    Args:
        source: of the deployment.
        name: the deployment.
        options: output and further input files.
        local: whether the deployment is on this machine, whose driver and network are then part of the report.
    """
    verify = None if options.verify is None else _read("--verify", options.verify, "results")
    bench = None if options.bench is None else _read("--bench", options.bench, "runs")
    recovery = None if options.recovery is None else _read("--recovery", options.recovery, "runs")
    page = options.file
    if options.gather is not None and (options.gather.is_dir() or not options.gather.absolute().parent.is_dir()):
        raise bad_input(
            f"--must-gather {str(options.gather)!r} is a directory, or its directory does not exist; name a file"
        )
    if page is None and options.form is None and options.gather is None:
        page = Path(f"dsv4-report-{time.strftime('%Y%m%dT%H%M%S')}.html")
    data = None if page is None else _data_file(page, options)
    item = source.get(name)
    memory = _plan(source, item)
    report = setup_report(item, time.time(), memory, _here() if local else Here(), verify, bench, recovery)
    document = report.to_dict()
    if page is not None and data is not None:
        text = json.dumps(document, indent=1)
        _write(page, render_page(report))
        _write(data, text)
        size = (page.stat().st_size + data.stat().st_size) / 1024
        note(f"{page}, {data}: {size:.0f} KiB; no prompts, keys, names or addresses")
    if options.gather is not None:
        own = [
            EvidenceFile("report.html", render_page(report).encode()),
            EvidenceFile("report.json", json.dumps(document, indent=1).encode()),
        ]
        deployment, files = source.evidence(item.name, complete=True)
        diagnostics.write_archive(options.gather, deployment, chain(own, files))
        note("the archive has names of hosts and addresses: give it to people you trust; share report.html in public")
    if options.form is not None:
        print_line(render_document(document, options.form))
    return ExitCode.OK


def merge(files: Sequence[str], options: ReportOptions) -> ExitCode:
    """Write a comparison of several reports as HTML, or print it."""
    if not _LEAST_MERGED <= len(files) <= _MOST_MERGED:
        raise bad_input(
            f"--merge compares {_LEAST_MERGED} to {_MOST_MERGED} reports, and {len(files)} are given; name JSON files"
        )
    for option in ("verify", "bench", "recovery"):
        if getattr(options, option) is not None:
            raise bad_input(f"--{option} and --merge are mutually exclusive; give --{option} where the report is made")
    if options.gather is not None:
        raise bad_input("--must-gather and --merge are mutually exclusive; a comparison has no deployment")
    if options.file is None and options.form is None:
        raise bad_input("--merge needs an output; add -f FILE.html or -o json")
    if options.file is not None:
        _check_page(options.file, [Path(file) for file in files])
    reports = [_read_report(Path(file)) for file in files]
    titles, rows = [setup_title(report) for report in reports], compared(reports)
    if options.file is not None:
        _write(options.file, render_comparison(titles, rows))
        note(f"{options.file}: {len(rows)} figures of {len(reports)} reports")
    if options.form is not None:
        figures = [{"figure": label, "values": values} for label, values in rows]
        document = {"schema": SCHEMA, "kind": f"{KIND}-comparison", "machines": titles, "figures": figures}
        print_line(render_document(document, options.form))
    return ExitCode.OK


def _read(option: str, path: Path, key: str) -> dict[str, Any]:
    """Return the JSON object in a file, with a list under `key` unless that is empty."""
    with convert_os_errors(f"{option}: cannot read"), path.open("rb") as file:
        data = file.read(_INPUT_BYTES + 1)
    if len(data) > _INPUT_BYTES:
        raise bad_input(f"{option} {str(path)!r} is larger than {_INPUT_BYTES // 2**20} MiB; name another file")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad_input(f"{option} {str(path)!r} is not JSON ({error}); write it with -o json") from None
    if not isinstance(document, dict) or (key and not isinstance(document.get(key), list)):
        raise bad_input(f"{option} {str(path)!r} has no list {key!r}; write it with `dsv4 {_COMMANDS[option]} -o json`")
    return document


def _read_report(path: Path) -> SetupReport:
    document = _read("--merge", path, "")
    if document.get("kind") != KIND:
        raise bad_input(f"--merge {str(path)!r} is no report; use the JSON file of `dsv4 report`")
    if document.get("schema") != SCHEMA:
        raise bad_input(f"--merge {str(path)!r} has another schema than {SCHEMA}; use reports of one version of dsv4")
    try:
        return SetupReport.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise bad_input(f"--merge {str(path)!r} is damaged: {place}: {first['msg']}; make it again") from None


def _check_page(page: Path, inputs: Sequence[Path]) -> None:
    """Refuse an output file that is not HTML, or that is also an input."""
    if page.suffix not in (".html", ".htm"):
        raise bad_input(f"--file {str(page)!r} is not the name of an HTML file; write for example report.html")
    if page.is_dir() or not page.absolute().parent.is_dir():
        raise bad_input(f"--file {str(page)!r} is a directory, or its directory does not exist; name another file")
    if any(page.resolve() == each.resolve() for each in inputs):
        raise bad_input(f"--file {str(page)!r} is also an input; name another file")


def _data_file(page: Path, options: ReportOptions) -> Path:
    """Return the JSON file beside the page; an existing file must be a report."""
    inputs = [path for path in (options.verify, options.bench, options.recovery) if path is not None]
    _check_page(page, inputs)
    data = page.with_suffix(".json")
    if data.exists() or any(data.resolve() == each.resolve() for each in inputs):
        try:
            ours = json.loads(data.read_bytes())["kind"] == KIND
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            ours = False
        if not ours:
            raise bad_input(f"{str(data)!r}, the JSON file beside --file, exists and is no report; name another file")
    return data


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole."""
    with convert_os_errors("cannot write"):
        partial = path.with_name(f".{path.name}.part")
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _plan(source: DeploymentSource, item: DeploymentView) -> MemoryPlan | None:
    """Return the memory plan without measured differences, on the kind of machine that measured last.

    None, with a warning, if there is none.
    """
    deployment = item.object
    ids = [group.measured.of.rpartition(" on ")[2] for group in item.status.groups if group.measured]
    try:
        kind, chosen = machine(deployment.spec.topology.hardware), False
        for name in ids:
            try:
                found = machine_named(name)
            except KeyError:
                continue
            if found.hardware == kind.hardware and found.sm:
                kind, chosen = found, True
        facts = source.facts(deployment, kind, chosen=chosen)
        memory = setup(deployment, replace(facts, model=_files(deployment))).memory
    except (CommandError, PlanRefused) as error:
        note(f"warning: the report has no memory plan: {error}")
        return None
    if ids and not _measured(item, memory):
        # Engines of a cluster are planned without their files.
        with suppress(PlanRefused):
            catalog = setup(deployment, facts).memory
            memory = catalog if _measured(item, catalog) else memory
    return memory


def _files(deployment: DSV4Deployment) -> Model | None:
    """Return the checkpoint that a start on this machine reads; None: it is planned by the catalog."""
    try:
        return model_here(deployment.spec.model)
    except BadCheckpoint:
        return None


def _measured(item: DeploymentView, plan: MemoryPlan) -> dict[int, dict[str, int]]:
    """Return the measured differences from the plan by group and term, without those from plans of other models."""
    return {
        group.index: {each.item: each.difference for each in group.measured.items}
        for group in item.status.groups[:MOST_GROUPS]
        if group.measured is not None and group.measured.of.startswith(f"{plan.model.name} in ")
    }


def _here() -> Here:
    found = gpus.find(seconds=_DRIVER_SECONDS)
    try:
        fabric = diagnostics.check_here(_FABRIC_SECONDS)
    except CommandError as error:
        note(f"warning: the report has no network of this machine: {error}")
        fabric = None
    cards = tuple(Gpu(machine=card.machine or OTHER, memory_bytes=card.memory_bytes) for card in found.cards)
    return Here(found.driver, cards, fabric)


def setup_report(
    item: DeploymentView,
    now: float,
    memory: MemoryPlan | None = None,
    here: Here = Here(),
    verify: Mapping[str, Any] | None = None,
    bench: Mapping[str, Any] | None = None,
    recovery: Mapping[str, Any] | None = None,
) -> SetupReport:
    """Return the report of a deployment at the Unix time `now`. Pure.

    Args:
        item: the deployment.
        now: the time of the report.
        memory: the plan without measured differences; None if there is none.
        here: the machine of the command.
        verify: the document of `dsv4 verify`.
        bench: the document of `dsv4 bench`.
        recovery: the document of `dsv4 bench recovery`.
    """
    groups = item.status.groups[:MOST_GROUPS]
    failures = [(group.index, failure) for group in groups for failure in group.history]
    failures = sorted(failures, key=lambda each: each[1].time)[-MOST_FAILURES:]
    return SetupReport(
        time=now,
        phase=item.phase,
        age_seconds=max(now - item.created, 0) if item.created else None,
        machine=_machine(item, memory, here),
        fabric=_fabric(here.fabric),
        versions=_versions(item),
        model=_model(item),
        specification=tuple(_settings(item)),
        flags=tuple(_flags(item))[:MOST_ROWS],
        memory=None if memory is None else _memory(item, memory),
        kernels=_kernels(item),
        verify=None if verify is None else _verify(verify),
        bench=None if bench is None else _bench(bench),
        recovery=None if recovery is None else _recovery(recovery),
        groups=tuple(
            GroupPart(
                index=group.index,
                phase=group.phase,
                serving_seconds=_serving_seconds(item, group, now),
                incarnation=group.incarnation,
                engine_generation=group.engine_generation,
                total_restarts=group.total_restarts,
                kv_tokens=group.kv_cache.tokens if group.kv_cache else None,
                kv_planned_tokens=group.kv_cache.planned_tokens if group.kv_cache else None,
                kv_concurrency=group.kv_cache.concurrency if group.kv_cache else None,
            )
            for group in groups
        ),
        failures=tuple(
            FailurePart(
                group=index,
                time=failure.time,
                cause=failure.cause,
                level=failure.level,
                detected_by=failure.detected_by or None,
                rank=failure.culprit_rank,
                incarnation=failure.incarnation,
                engine_generation=failure.engine_generation,
                recover_seconds=failure.recover_seconds,
            )
            for index, failure in failures
        ),
        conditions=tuple(
            ConditionPart(type=each.type, status=each.status, reason=each.reason, since=each.last_transition_time)
            for each in item.status.conditions[:32]
        ),
        warnings=tuple(_warnings(item))[:MOST_ROWS],
    )


def _serving_seconds(item: DeploymentView, group: GroupStatus, now: float) -> float | None:
    serving = item.running and group.phase is GroupPhase.SERVING and group.ready_time
    return max(now - group.ready_time, 0) if serving and group.ready_time else None


def _machine(item: DeploymentView, memory: MemoryPlan | None, here: Here) -> MachinePart:
    kind = memory.machine if memory is not None else machine(item.object.spec.topology.hardware)
    return MachinePart(
        id=kind.id,
        title=kind.title,
        hardware=item.object.spec.topology.hardware,
        memory_bytes=kind.memory_bytes or None,
        driver=here.driver,
        gpus=here.gpus[:64],
    )


def _fabric(doctor: Mapping[str, Any] | None) -> FabricPart:
    if doctor is None:
        return FabricPart()
    speeds = {each.get("name"): each.get("speed") for each in _rows(doctor, "interfaces")}
    ports = tuple(
        FabricPort(rdma=bool(rail.get("hca")), mtu=rail.get("mtu"), speed_mbit=speeds.get(rail.get("interface")))
        for rail in _rows(doctor, "rails")[:64]
    )
    return FabricPart(
        transport="RDMA" if any(port.rdma for port in ports) else "sockets",
        ports=ports,
        checks=tuple(
            FabricCheck(
                # The second word of a name is a device or an address.
                name=str(each.get("name")).partition(" ")[0],
                level=each.get("level", OTHER),
                reason=each.get("reason"),
                value=each.get("value"),
            )
            for each in _rows(doctor, "checks")[:MOST_ROWS]
        ),
    )


def _rows(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = document.get(key)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _profile(item: DeploymentView) -> ImageProfile | None:
    engine = item.object.spec.engine
    name = engine.build.base if engine.build else engine.profile
    try:
        return profile_named(name) if name else profile_for(engine.image, item.object.spec.topology.hardware)
    except KeyError:
        return None


def _versions(item: DeploymentView) -> VersionsPart:
    try:
        own = importlib.metadata.version("dsv4")
    except importlib.metadata.PackageNotFoundError:
        own = ""
    engine, profile = item.object.spec.engine, _profile(item)
    return VersionsPart(
        dsv4=own.partition("+")[0],
        profile=profile.name if profile else OTHER,
        own_build=engine.build is not None,
        vllm=profile.vllm if profile else OTHER,
        libraries=profile.libraries if profile else (),
        image_digest=(engine.image or "").rpartition("@")[2],
    )


def _model(item: DeploymentView) -> ModelPart:
    spec = item.object.spec.model
    kinds = {
        "nano": spec.source.nano,
        "path": spec.source.path,
        "huggingFace": spec.source.hugging_face,
        "s3": spec.source.s3,
        "http": spec.source.http,
        "sharedPath": spec.source.shared_path,
    }
    hub = spec.source.hugging_face
    name = spec.checkpoint or (hub.repo if hub else spec.source.path or spec.source.shared_path or "")
    found = checkpoint_named(name)
    in_catalog = hub is not None and hub.repo in {each.repo for each in models()}
    return ModelPart(
        checkpoint=found.name if found else str(spec.variant),
        source=next((kind for kind, value in kinds.items() if value is not None), OTHER),
        revision=hub.revision if hub is not None and in_catalog else None,
    )


def _settings(item: DeploymentView) -> Iterator[SettingPart]:
    for path in SETTINGS:
        part: Any = item.object.spec
        for key in path.split("."):
            name = next(name for name, field in type(part).model_fields.items() if field.alias == key)
            part = getattr(part, name)
        if part is not None:
            yield SettingPart(field=path, value=part)


def _flags(item: DeploymentView) -> Iterator[str]:
    engine = item.object.spec.engine
    yield from dict.fromkeys(argument.name for argument in read_arguments(engine.extra_args))
    yield from dict.fromkeys(variable.name for variable in engine.env)


def _memory(item: DeploymentView, plan: MemoryPlan) -> MemoryPart:
    rank = plan.ranks[plan.tightest]
    measured = _measured(item, plan)

    def figures(name: str, planned: int) -> tuple[GroupFigure, ...]:
        found = ((index, items[name]) for index, items in measured.items() if name in items)
        return tuple(GroupFigure(group=index, bytes=planned + difference) for index, difference in found)

    terms = [
        MemoryTerm(
            name=each.name,
            in_budget=each.where is MemoryPool.BUDGET,
            planned_bytes=each.bytes,
            least_bytes=each.least,
            most_bytes=each.most,
            measured=figures(each.name, each.bytes) if each.where is MemoryPool.BUDGET else (),
        )
        for each in rank.items
    ]
    cache = MemoryTerm(
        name=KV_CACHE,
        in_budget=True,
        planned_bytes=rank.kv_bytes,
        least_bytes=max(rank.kv_least, 0),
        most_bytes=max(rank.kv_most, 0),
        measured=() if rank.kv_given else figures(KV_CACHE, rank.kv_available),
    )
    return MemoryPart(
        verdict=plan.verdict,
        rank=rank.rank,
        memory_bytes=rank.memory_bytes,
        used_bytes=rank.used_bytes,
        tokens=plan.kv.tokens if plan.kv else None,
        concurrency=plan.kv.concurrency if plan.kv else None,
        terms=(*terms, cache),
    )


def _kernels(item: DeploymentView) -> tuple[KernelSet, ...]:
    """Return the choices of the engines, one entry for all groups with an equal choice."""
    sets: dict[tuple[KernelStatus, ...], list[int]] = {}
    for group in item.status.groups[:MOST_GROUPS]:
        if group.kernels:
            # Times differ a little between groups.
            same = next((known for known in sets if _choice(known) == _choice(group.kernels)), group.kernels)
            sets.setdefault(same, []).append(group.index)
    return tuple(
        KernelSet(groups=tuple(numbers), operations=tuple(map(_operation, kernels[:32])))
        for kernels, numbers in list(sets.items())[:MOST_KERNEL_SETS]
    )


def _choice(kernels: Sequence[KernelStatus]) -> list[tuple[object, ...]]:
    return [
        (each.op, each.provider, bool(each.note), *((one.provider, bool(one.excluded)) for one in each.standings))
        for each in kernels
    ]


def _operation(found: KernelStatus) -> Operation:
    compared = found.against_next()
    return Operation(
        op=found.op,
        provider=found.provider,
        changed=bool(found.note),
        next=compared[0] if compared else None,
        speedup=round(compared[1], 3) if compared else None,
        standings=tuple(
            Standing(provider=each.provider, slowness=each.slowness, excluded=each.excluded is not None)
            for each in found.standings[:16]
        ),
    )


def _verify(document: Mapping[str, Any]) -> VerifyPart:
    facts = document.get("facts")
    facts = facts if isinstance(facts, Mapping) else {}
    return VerifyPart(
        quick=document.get("quick"),
        seconds=document.get("seconds"),
        exit_code=document.get("exitCode"),
        engine=str(facts.get("engine", "")).partition("+")[0],
        max_model_len=facts.get("max_model_len"),
        results=tuple(
            CheckResult(
                name=each.get("name", OTHER),
                status=each.get("status", OTHER),
                reason=each.get("reason"),
                seconds=each.get("seconds"),
                figures=each.get("figures", {}),
            )
            for each in _rows(document, "results")[:MOST_ROWS]
        ),
    )


def _bench(document: Mapping[str, Any]) -> BenchPart:
    return BenchPart(runs=tuple(BenchRun.model_validate(run) for run in _rows(document, "runs")[:MOST_ROWS]))


def _recovery(document: Mapping[str, Any]) -> RecoveryPart:
    runs = [{**run, "samples": _rows(run, "samples")[:MOST_ROWS]} for run in _rows(document, "runs")[:MOST_ROWS]]
    return RecoveryPart(clients=document.get("clients"), runs=tuple(map(RecoveryRow.model_validate, runs)))


def _warnings(item: DeploymentView) -> Iterator[WarningPart]:
    for group in item.status.groups[:MOST_GROUPS]:
        for member in group.members:
            for text in member.warnings:
                found = ((kind, pattern.match(text)) for kind, pattern in WARNINGS.items())
                kind, match = next(((kind, match) for kind, match in found if match), (OTHER, None))
                figures = [int(each) if each else None for each in match.groups()] if match else [None] * 3
                gpu, value, maximum = figures
                yield WarningPart(group=group.index, rank=member.rank, kind=kind, gpu=gpu, value=value, maximum=maximum)
