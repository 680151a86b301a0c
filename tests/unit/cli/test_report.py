"""`dsv4 report`: permitted content, privacy, escaping, size, comparison, files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import time
import types
from collections.abc import Callable
from enum import Enum
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from report_fixtures import BENCH, NOW, RECOVERY, SPARKS, VERIFY, doctor, large_status, sparks

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, load
from dsv4_operator.api.status import MeasuredItem, MeasuredStatus
from dsv4_operator.backends.local.facts import model_here
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli import diagnostics, report, report_fields
from dsv4_operator.cli.main import run
from dsv4_operator.cli.report import Here, setup_report
from dsv4_operator.cli.report_fields import BenchRun, SetupReport
from dsv4_operator.cli.report_page import compared, render_comparison, render_page, setup_title
from dsv4_operator.cli.sources.base import DeploymentView
from dsv4_operator.planning.catalog import machine_named, machines, model, models
from dsv4_operator.planning.images import profiles
from dsv4_operator.planning.memory import EngineSettings, Parallel, memory_plan
from dsv4_operator.planning.memory.runs import runs
from dsv4_operator.planning.setup import with_settings
from dsv4_operator.verify.speed import Row
from dsv4_runtime.fabric.checks import CheckReason
from dsv4_runtime.nano.checkpoint import make as make_nano
from dsv4_runtime.nano.recipe import Precision
from dsv4_testkit.openai_server import Engine, serving

ROOT = Path(__file__).parents[3]
MOST_BYTES = 2 * 10**6
PLAN = memory_plan(model("V4-Flash-0731"), machine_named("gb10"), Parallel(2), EngineSettings(131_072, 4, 2048))

CANARIES = (
    "zqhost",
    "zqhost-7f3a.lab.example",
    "10.88.0.17",
    "192.168.177.12/24",
    "fd00:17::2a",
    "sk-zq-9f8e7d6c5b4a39281706",
    "hf_zqaB3aB3aB3aB3aB3aB3aB3aB3",
    "/home/zquser/models/secret",
    "https://zquser:zqpass@store.example:9000/x",
    "Tell me about zqprompt",
    "0123456789abcdef" * 2,
    "a1b2c3d4" * 6,
)


class Filler:
    """Fills models with random values, and with canaries in every text."""

    def __init__(self, seed: int, texts: tuple[str, ...] = CANARIES, *, odd_numbers: bool = True) -> None:
        self.random, self.texts = random.Random(seed), texts
        self.numbers = (0, 1, 2, 7, 3600.5, NOW, *((-1, 2**62, float("inf"), float("nan")) if odd_numbers else ()))

    def text(self) -> str:
        found = self.random.choice(self.texts)
        around = self.random.choice(("{}", "GPU 0 runs at {} of 2400 MHz", "failed: {}", "--{}", "x@{}", "{}=1"))
        return around.format(found)

    def number(self) -> float:
        return self.random.choice(self.numbers)

    def value(self, kind: Any) -> Any:
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self.value(arguments[0])
        if origin in (Union, types.UnionType):
            choices = [each for each in arguments if each is not type(None)]
            return self.value(self.random.choice(choices))
        if origin is Literal:
            return self.random.choice(arguments)
        if origin in (tuple, list):
            return tuple(self.value(arguments[0]) for _ in range(self.random.randint(1, 2)))
        if origin in (dict,):
            return {self.value(arguments[0]): self.value(arguments[1])}
        if kind is Any:
            return self.text()
        if issubclass(kind, BaseModel):
            return self.model(kind)
        if issubclass(kind, Enum):
            return self.random.choice(list(kind))
        if kind is bool:
            return self.random.random() < 0.5
        if kind is int:
            return self.random.choice([each for each in self.numbers if isinstance(each, int)])
        return self.number() if kind is float else self.text()

    def model(self, kind: type[BaseModel]) -> Any:
        return kind.model_construct(**{name: self.value(field.annotation) for name, field in kind.model_fields.items()})

    def document(self, found: Any) -> Any:
        """Return JSON values of the same form with a canary in place of every text, and sometimes of every key."""
        if isinstance(found, dict):
            keys = {key: self.text() if self.random.random() < 0.1 else key for key in found}
            return {keys[key]: self.document(value) for key, value in found.items()}
        if isinstance(found, list):
            return [self.document(each) for each in found]
        return self.text() if isinstance(found, str) and self.random.random() < 0.9 else found


def outputs(found: SetupReport) -> list[str]:
    return [
        render_page(found),
        json.dumps(found.to_dict()),
        render_comparison([setup_title(found)] * 2, compared([found, found])),
    ]


def assert_private(found: SetupReport) -> None:
    for text in outputs(found):
        assert "zq" not in text.lower()
        assert [canary for canary in CANARIES if canary in text] == []


@given(seed=st.integers(0, 2**32), running=st.booleans())
@settings(max_examples=150)
def test_no_text_of_specification_status_or_files_is_in_a_report(seed: int, running: bool) -> None:
    fill = Filler(seed)
    item = DeploymentView(fill.model(DSV4Deployment), running, NOW - 100)
    rank = PLAN.ranks[0]
    items = tuple(dataclasses.replace(each, name=fill.text()) for each in rank.items)
    strange = dataclasses.replace(PLAN, ranks=(dataclasses.replace(rank, items=items),), tightest=0)
    here = Here(fill.text(), (), fill.document(doctor()))
    assert_private(setup_report(item, NOW, strange, here, *map(fill.document, (VERIFY, BENCH, RECOVERY))))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=100)
def test_a_report_of_others_brings_no_text_either(seed: int) -> None:
    """Fields that are added later are covered too, because the document is generated from the models."""
    fill = Filler(seed)
    document = json.loads(json.dumps(fill.model(SetupReport).model_dump(by_alias=True, warnings=False)))
    assert any(canary in json.dumps(document) for canary in CANARIES)
    document |= {"specification": [each for each in document["specification"] if each["field"]]}
    assert_private(SetupReport.model_validate(document))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=50)
def test_every_text_is_escaped(seed: int) -> None:
    fill = Filler(seed, ("<script>alert(1)</script>", "\"><img src=x onerror='y'>", "&lt;<b>"), odd_numbers=False)
    found = fill.model(SetupReport)
    allowed = {"html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "section", "dl", "dt", "dd"}
    allowed |= {"div", "table", "thead", "tbody", "tr", "th", "td", "svg", "text", "rect"}
    for page in (render_page(found), render_comparison([fill.text()], [(fill.text(), [fill.text()])])):
        tags = Tags()
        tags.feed(page)
        assert tags.names <= allowed
        assert "&lt;" in page
        assert not any(name.startswith("on") or name in ("src", "href") for name in tags.attributes)


class Tags(HTMLParser):
    """Names of tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_a_report_has_all_permitted_content() -> None:
    document = full().to_dict()
    assert (document["schema"], document["kind"], document["phase"]) == (1, "dsv4-report", "Serving")
    assert document["machine"]["title"] == "DGX Spark, 128 GB (GB10)"
    assert document["fabric"]["transport"] == "RDMA"
    assert document["fabric"]["ports"] == [{"rdma": True, "mtu": 9000, "speedMbit": 200_000}]
    assert {"name": "port", "level": "warn", "reason": "LinkDown"} in document["fabric"]["checks"]
    assert document["versions"]["profile"] == "vllm-0.33"
    assert document["versions"]["imageDigest"] == "sha256:" + "ab" * 32
    assert document["model"] == {"checkpoint": "V4-Flash-0731", "source": "huggingFace", "revision": "0" * 40}
    assert {"field": "engine.maxModelLen", "value": 131_072} in document["specification"]
    assert document["flags"] == ["--linear-backend", "other", "NCCL_DEBUG", "other"]
    weights = next(term for term in document["memory"]["terms"] if term["name"] == "weights")
    assert weights["measured"] == [{"group": 0, "bytes": weights["plannedBytes"] + 2**30}]
    [kernels] = document["kernels"]
    moe = kernels["operations"][0]
    assert (moe["provider"], moe["next"], moe["speedup"]) == ("bundled", "marlin", 1.28)
    assert {"provider": "deepgemm", "excluded": True} in moe["standings"]
    assert document["verify"]["results"][0]["name"] == "smoke.chat"
    assert document["bench"]["runs"][0]["outputTokensPerSecond"] == 40.65
    assert [each["fault"] for each in document["recovery"]["runs"]] == ["stop-engine", "other"]
    [failure] = document["failures"]
    assert (failure["cause"], failure["level"], failure["recoverSeconds"]) == ("EngineHung", 1, 63.5)
    assert "message" not in failure
    assert document["warnings"] == [
        {"group": 0, "rank": 1, "kind": "clock", "gpu": 0, "value": 850, "maximum": 2418},
        {"group": 0, "rank": 1, "kind": "other"},
    ]
    assert document["groups"][0]["servingSeconds"] == 7200
    assert SetupReport.model_validate(document).to_dict() == document


def test_a_row_of_bench_has_every_field_of_a_report() -> None:
    """A renamed field would be missing without an error, because both sides allow unknown ones."""
    written = {field.alias or name for name, field in Row.model_fields.items()}
    assert {field.alias for field in BenchRun.model_fields.values()} <= written


def full() -> SetupReport:
    return setup_report(sparks(), NOW, PLAN, Here("580.173.02", (), doctor()), VERIFY, BENCH, RECOVERY)


def test_the_page_has_everything_and_needs_nothing() -> None:
    page = render_page(full())
    for text in (
        "2 × DGX Spark, 128 GB (GB10), V4-Flash-0731",
        "580.173.02",
        "1.28 × marlin",
        "EngineHung",
        "63.5 s",
        "<dt>engine.maxModelLen</dt><dd>131,072</dd>",
        "smoke.chat",
        "chat, 1 concurrent",
        "40.65",
        "stop-engine",
        "64.8 s",
        "prefers-color-scheme: dark",
        'name="viewport"',
    ):
        assert text in page
    assert not re.search(r"https?:|@import|url\(|<script|<link|<img", page)
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.names
    # On a narrow screen each table scrolls in its own box.
    assert page.count("<table") == page.count('<div class="scroll"><table')


def test_a_stopped_deployment_without_status(make: Any) -> None:
    found = setup_report(DeploymentView(make.deployment(), False, None), NOW)
    assert found.to_dict()["phase"] == "Stopped"
    assert "No failure is recorded" in render_page(found)


def with_status(status: DeploymentStatus) -> DeploymentView:
    item = sparks()
    return dataclasses.replace(item, object=item.object.model_copy(update={"status": status}))


@pytest.mark.parametrize(("groups", "members", "alike"), [(100, 16, False), (100, 2, True), (512, 16, False)])
def test_a_large_status_is_a_small_report(groups: int, members: int, alike: bool) -> None:
    item = dataclasses.replace(
        sparks(), object=sparks().object.model_copy(update={"status": large_status(groups, members, alike=alike)})
    )
    many = {**BENCH, "runs": BENCH["runs"] * 400}
    results = {**VERIFY, "results": VERIFY["results"] * 400}
    found = setup_report(item, NOW, PLAN, Here("", (), doctor()), results, many)
    page, text = render_page(found), json.dumps(found.to_dict(), indent=1)
    assert len(found.groups) == groups
    assert len(page.encode()) <= MOST_BYTES
    assert len(text.encode()) <= MOST_BYTES
    assert len(found.kernels) == (1 if alike else report_fields.MOST_KERNEL_SETS)


def test_the_latest_failures_are_kept() -> None:
    status = large_status(512, 2, alike=True)
    item = with_status(status)
    times = [failure.time for failure in setup_report(item, NOW).failures]
    assert len(times) == report_fields.MOST_FAILURES
    every = sorted(failure.time for group in status.groups for failure in group.history)
    assert times == every[-len(times) :]


# Vocabularies


def test_every_term_of_every_plan_is_known() -> None:
    plans = [each.plan for each in runs()]
    plain = EngineSettings(8192, 2, 2048, speculative_tokens=2, load_format="instanttensor")
    shapes = (Parallel(1), Parallel(2), Parallel(4, devices_per_node=4))
    for kind, profile, shape in itertools.product(machines(), profiles(), shapes):
        engine = dataclasses.replace(plain, build=profile.build)
        plans += [memory_plan(each, kind, shape, engine) for each in models()[:2]]
    names = {item.name for plan in plans for rank in plan.ranks for item in rank.items}
    assert "weights" in names
    assert names <= set(report_fields.TERMS)


def test_words_of_other_packages_are_known() -> None:
    assert set(report_fields.FABRIC_REASONS) == {str(each) for each in CheckReason}
    source = (ROOT / "runtime/dsv4_runtime/fabric/checks.py").read_text()
    names = set(re.findall(r'Check\(\s*f?"(\w+)', source))
    assert {"rdma", "port", "speed"} <= names <= set(report_fields.FABRIC_CHECKS)
    assert {each["name"].split()[0] for each in diagnostics.check_here(20)["checks"]} <= set(
        report_fields.FABRIC_CHECKS
    )
    providers = (ROOT / "runtime/dsv4_runtime/vllm_plugin/kernels/providers.py").read_text()
    kernels = set(re.findall(r'\(\s*"(\w+)",\s*(?:\w+_missing|lambda)', providers)) - {"b12x"}
    assert {"marlin", "flashinfer"} <= kernels <= set(report_fields.KERNELS)
    contract = (ROOT / "runtime/dsv4_runtime/contract/status.py").read_text()
    text = contract.split('"""Signal that detected it:')[1].split('"""')[0]
    assert set(re.findall(r"`(\w+)`", text)) == set(report_fields.SIGNALS)
    slow = (ROOT / "runtime/dsv4_runtime/health/gpu.py").read_text()
    for text in ("} runs at {", "} has {", "} is slowed by its power limit of {"):
        assert text in slow


# Command


def report_file(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["report", *arguments, "-o", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_of_this_machine(
    root: Path,
    saved: Callable[..., Any],
    held: Callable[..., int],
    make: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Only a bound, which a busy machine reaches.
    monkeypatch.setattr(report, "_FABRIC_SECONDS", 60.0)
    held(saved(make.status(make.failed_group(make.failure(recover_seconds=12.5))), name="zqname"))
    page = root / "report.html"
    assert run(["report", "zqname", "-f", str(page), "--state-dir", str(root)]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "no prompts, keys, names or addresses" in err
    document = json.loads(page.with_suffix(".json").read_text())
    assert document["machine"]["id"] == "cpu"
    assert document["failures"][0]["recoverSeconds"] == 12.5
    assert {term["name"] for term in document["memory"]["terms"]} >= {"KV cache", "worker and Ray processes"}
    assert "kernel" in {check["name"] for check in document["fabric"]["checks"]}
    for text in (page.read_text(), page.with_suffix(".json").read_text()):
        assert [
            each for each in ("local-0", "10.88.0", "/state", str(root), "killed by", "zqname") if each in text
        ] == []
    # Written again without confirmation, because both files are reports.
    assert run(["report", "zqname", "-f", str(page), "--state-dir", str(root)]) == 0
    assert sorted(each.name for each in root.glob("*report*")) == ["report.html", "report.json"]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_nano(tmp_path_factory.mktemp("weights") / "mine", precision=Precision.FP8)


@pytest.mark.parametrize(
    ("subject", "plan_of", "measured"),
    [("mine", "mine", [7]), ("Nano", "Nano", [7]), ("V4-Flash", "mine", [])],
)
def test_measured_memory_is_beside_the_plan_of_its_start(
    subject: str,
    plan_of: str,
    measured: list[int],
    fp8: Path,
    root: Path,
    make: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Agents report differences from their plan: a start here reads the files, one in a cluster does not."""
    items = (MeasuredItem(item="weights", difference=7),)
    found = MeasuredStatus(of=f"{subject} in the default image on h200", incarnation=1, items=items)
    changes = {"model.source": {"path": str(fp8)}, "topology.hardware": "H200", "topology.nodesPerGroup": 1}
    deployment = with_settings(make.deployment(), changes)
    state = DeploymentState(root, deployment.metadata.name)
    state.prepare()
    state.save_manifest(deployment)
    state.save_object(deployment.model_copy(update={"status": make.status(make.group(measured=found))}))
    document = report_file(capsys, "nano", "--state-dir", str(root))
    weights = next(term for term in document["memory"]["terms"] if term["name"] == "weights")
    size = {"mine": model_here(deployment.spec.model), "Nano": model("Nano")}[plan_of].weight_bytes
    assert weights["plannedBytes"] == pytest.approx(size, rel=0.02)
    assert [each["bytes"] - weights["plannedBytes"] for each in weights["measured"]] == measured


def test_of_a_cluster(deployed: Callable[..., Any], world: Any, make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(make.status(make.failed_group(make.failure())))
    document = report_file(capsys, "nano", "-n", "zqnamespace")
    assert document["failures"][0]["cause"] == "EngineCoreDied"
    assert document["fabric"] == {"transport": "unknown", "ports": [], "checks": []}
    assert "zqnamespace" not in json.dumps(document)


def test_with_results_of_a_real_verification(
    root: Path, saved: Callable[..., Any], make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(make.status())
    with serving(Engine()) as url:
        assert run(["verify", "--url", url, "-o", "json", "--limit", "5m"]) == 0
    verified = json.loads(capsys.readouterr().out)
    results, figures = tmp_path / "verify.json", tmp_path / "bench.json"
    results.write_text(json.dumps(verified))
    figures.write_text(json.dumps(BENCH))
    options = ("--verify", str(results), "--bench", str(figures), "--state-dir", str(root))
    document = report_file(capsys, "nano", *options)
    assert [each["name"] for each in document["verify"]["results"]] == [each["name"] for each in verified["results"]]
    numbers = [
        {key for key, value in each.get("figures", {}).items() if isinstance(value, int | float)}
        for each in verified["results"]
    ]
    assert [set(each["figures"]) >= known for each, known in zip(document["verify"]["results"], numbers, strict=True)]
    known = set().union(*numbers)
    assert known - {"tokens"}
    assert known <= report_fields.FIGURES
    assert url not in json.dumps(document)
    assert [each["profile"] for each in document["bench"]["runs"]] == ["chat", "rag", "other"]


def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = full().to_dict(), full().to_dict()
    second["machine"] |= {"id": "gb10-64gb", "title": "DGX Spark, 64 GB (GB10)"}
    second["bench"]["runs"][0]["outputTokensPerSecond"] = 38.5
    for name, document in (("a", first), ("b", second)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    page = tmp_path / "both.html"
    words = ["report", "--merge", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-f", str(page)]
    assert run([*words, "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    figures = {each["figure"]: each["values"] for each in document["figures"]}
    assert document["machines"] == [
        "2 × DGX Spark, 128 GB (GB10), V4-Flash-0731",
        "2 × DGX Spark, 64 GB (GB10), V4-Flash-0731",
    ]
    assert figures["chat, 1 concurrent: output tokens/s"] == [40.65, 38.5]
    assert figures["kernel of moe"] == ["bundled", "bundled"]
    assert figures["longest recovery"] == ["63.5 s", "63.5 s"]
    text = page.read_text()
    assert text.count('<th scope="col">') == 3
    assert "1. 2 × DGX Spark, 128 GB" in text


def test_equal_rows_of_a_benchmark_stay_apart() -> None:
    bench = {"schema": 1, "runs": [{"profile": "unknown-a", "requests": 1}, {"profile": "unknown-b", "requests": 2}]}
    found = setup_report(sparks(), NOW, bench=bench)
    rows = dict(compared([found]))
    assert rows["other: requests"] == [1]
    assert rows["other (2): requests"] == [2]


NOTHING_LOST = "keep me"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nano", "-f", "report.txt"], "--file 'report.txt' is not the name of an HTML file"),
        (
            ["nano", "-f", "missing/report.html"],
            "--file 'missing/report.html' is a directory, or its directory does not",
        ),
        (["nano", "-f", "notes.html"], "'notes.json', the JSON file beside --file, exists and is no report"),
        (["nano", "-f", "bench.html", "--bench", "bench.json"], "'bench.json', the JSON file beside --file"),
        (["nano", "--verify", "missing.json"], "--verify: cannot read 'missing.json': No such file"),
        (["nano", "--verify", "notes.json"], "--verify 'notes.json' is not JSON"),
        (["nano", "--verify", "deep.json"], "--verify 'deep.json' is not JSON"),
        (["nano", "--verify", "bench.json"], "has no list 'results'; write it with `dsv4 verify -o json`"),
        (["nano", "--bench", "list.json"], "has no list 'runs'; write it with `dsv4 bench -o json`"),
        (["nano", "a.json"], "'a.json': one deployment has one report; add --merge"),
        (["--merge", "bench.json", "-o", "json"], "--merge compares 2 to 32 reports, and 1 are given"),
        (["--merge", "bench.json", "list.json"], "--merge needs an output; add -f FILE.html or -o json"),
        (["--merge", "bench.json", "bench.json", "-o", "json"], "--merge 'bench.json' is no report"),
        (["--merge", "newer.json", "newer.json", "-o", "json"], "--merge 'newer.json' has another schema than 1"),
        (["--merge", "bad.json", "bad.json", "-o", "json"], "--merge 'bad.json' is damaged: phase: Field required"),
        (["--merge", "a.json", "b.json", "--bench", "c", "-o", "json"], "--bench and --merge are mutually exclusive"),
        (["--merge", "list.html", "b.json", "-f", "list.html"], "--file 'list.html' is also an input"),
    ],
)
def test_bad_input_is_one_error_and_loses_nothing(
    words: list[str],
    message: str,
    root: Path,
    saved: Callable[..., Any],
    make: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved(make.status())
    monkeypatch.chdir(tmp_path)
    files = {
        "notes.json": NOTHING_LOST,
        "list.html": NOTHING_LOST,
        "bench.json": json.dumps(BENCH),
        "list.json": "[]",
        "deep.json": "[" * 100_000,
        "newer.json": '{"kind": "dsv4-report", "schema": 2}',
        "bad.json": '{"kind": "dsv4-report", "schema": 1}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert run(["report", *words, "--state-dir", str(root)]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.count("error: ") == 1
    assert out == ""
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_report_takes_little_time(
    root: Path, saved: Callable[..., Any], held: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held(saved(large_status(100, 16, alike=False)))
    began = time.process_time()
    assert run(["report", "-f", str(tmp_path / "large.html"), "--state-dir", str(root)]) == 0
    assert time.process_time() - began < 10
    assert "KiB" in capsys.readouterr().err


def test_the_example_of_the_documentation_is_real() -> None:
    page = (ROOT / "docs" / "report.md").read_text()
    [example] = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    document = full().to_dict()
    shown = json.loads(example)
    assert shown == {key: document[key] for key in shown}
    assert set(shown) >= {"machine", "fabric", "model", "failures", "warnings"}
    manifest = load(SPARKS)
    assert manifest.status == DeploymentStatus()


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), float("inf"), float("nan"), 10**16, True, "7"],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_no_usual_number_is_left_out(value: object) -> None:
    assert BenchRun.model_validate({"requests": value, "failed": 3}).model_dump(include={"requests", "failed"}) == {
        "requests": None,
        "failed": 3,
    }
