"""`dsv4 verify`: exit codes, limits, resumption, reports, references, and messages for wrong options."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.cli.main import run
from dsv4_operator.cli.verify import line
from dsv4_operator.verify.checks import Result, Status
from dsv4_operator.verify.content import language_problem
from dsv4_operator.verify.endpoint import Address, Client, Defect, read_document
from dsv4_operator.verify.oracle import plan_load
from dsv4_testkit.openai_server import Engine, serving
from dsv4_testkit.waiting import free_ports

FEW = ("--only", "smoke.chat", "--only", "smoke.usage", "--only", "structured.choice")


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def statuses(found: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["status"] for each in found["results"]}


def test_a_quick_run_passes(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine()) as url:
        assert run(["verify", "--url", url.removesuffix("/v1"), "--quick", "--limit", "5m"]) == 0
    out = capsys.readouterr().out
    assert "smoke.template" in out
    assert "0 failed" in out.splitlines()[-1]
    assert "generation.chinese-max" not in out


def test_reasoning_fits_a_short_context(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine(context=1024)) as url:
        code = run(["verify", "--url", url, "--only", "smoke.thinking", "-o", "json"])
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert (code, result["status"]) == (0, "ok"), result


def test_text_names_finding_evidence_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine("ignored stop")) as url:
        assert run(["verify", "--url", url, "--only", "smoke.stop"]) == 1
    out = capsys.readouterr().out
    assert "smoke.stop" in out
    assert "failed" in out
    assert "remedy: " in out


def test_an_endpoint_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_ports(1)[0]
    assert run(["verify", "--url", f"http://127.0.0.1:{port}"]) == 3
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("requests", [8, 12, 20])
def test_an_endpoint_that_dies_makes_the_run_incomplete_and_resumable(
    requests: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, engine = tmp_path / "state.json", Engine()
    command = ["verify", "--quick", "--limit", "5m", "-o", "json", "--resume", str(file), "--url"]
    with serving(engine) as url:
        engine.fail_after = requests
        assert run([*command, url]) == 3
        first = document(capsys)
        assert json.loads(file.read_text())["results"] == first["results"]
        reasons = {each.get("reason") for each in first["results"] if each["status"] == "skipped"}
        assert "Unreachable" in reasons
        done = {name for name, status in statuses(first).items() if status == "ok"}
        engine.fail_after = None
        assert run([*command, url]) == 0
    second = document(capsys)
    assert set(statuses(second)) == set(statuses(first))
    # A finished check is not repeated: its times are those of the first run.
    seconds = [{each["name"]: each.get("seconds") for each in found["results"]} for found in (first, second)]
    assert all(seconds[0][name] == seconds[1][name] for name in done)


def test_a_resumed_run_keeps_failed_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "state.json"
    engine = Engine("wrong usage")
    with serving(engine) as url:
        command = ["verify", "--url", url, "--resume", str(file), *FEW]
        assert run(command) == 1
        engine.defect = ""
        assert run(command) == 1
    capsys.readouterr()


@pytest.mark.parametrize("logprobs", ["ignored", "rejected"])
def test_an_endpoint_without_log_probabilities_has_no_defect(logprobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine()
    engine.listed, engine.logprobs = [{"id": "m"}], logprobs
    with serving(engine) as url:
        only = ("smoke.completions", "smoke.stream", "smoke.usage", "smoke.stop", "smoke.parallel")
        options = [word for name in (*only, "context.prefix-cache") for word in ("--only", name)]
        assert run(["verify", "--url", url, "-o", "json", *options]) == 0
    assert statuses(document(capsys)) == {**dict.fromkeys(only, "ok"), "context.prefix-cache": "skipped"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"cache_metrics": False}, "NotOffered"),
        ({"cache": 10_000_000}, "TooLarge"),
        # One request at a time, as with --max-num-seqs 1.
        ({"seqs": 1}, "Inconclusive"),
        # A limit of requests is no defect.
        ({"defect": "failed under pressure", "failed_status": 429}, "Inconclusive"),
    ],
)
def test_an_exhausted_cache(change: dict[str, Any], reason: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(delay=0.1 if "seqs" in change else 0.3)
    for name, value in change.items():
        setattr(engine, name, value)
    with serving(engine) as url:
        assert run(["verify", "--url", url, "-o", "json", "--only", "context.pressure"]) == 0
        [found] = document(capsys)["results"]
        if reason is not None:
            assert (found["status"], found["reason"]) == ("skipped", reason)
            return
        assert found["figures"]["preemptions"] > 0
        # The time of all requests must be below that of one.
        assert run(["verify", "--url", url, "-o", "json", "--only", "context.pressure", "--timeout", "2s"]) == 0
    [found] = document(capsys)["results"]
    assert (found["status"], found["reason"]) == ("skipped", "TooLarge")


def test_a_cache_that_is_not_exhausted_at_once_is_with_more_requests(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(delay=0.3)
    engine.cache, engine.single_factor = 8192, 3
    with serving(engine) as url:
        assert run(["verify", "--url", url, "-o", "json", "--only", "context.pressure"]) == 0
    [found] = document(capsys)["results"]
    assert found["status"] == "ok"
    assert found["figures"]["requests"] > 4
    assert found["figures"]["preemptions"] > 0


@given(st.integers(64, 8192), st.integers(1, 16), st.floats(1e-6, 1.0), st.floats(0.01, 60.0))
def test_the_load_exceeds_the_cache(tokens: int, factor: int, share: float, seconds: float) -> None:
    longest = tokens * factor
    load = plan_load(tokens, longest, share, seconds)
    assert load.tokens <= longest
    assert load.requests >= 4
    assert load.requests * share * load.tokens / tokens >= 1.48
    # No more requests than needed, and with short prompts no more than preferred.
    assert load.requests == 4 or (load.requests - 1) * share * load.tokens / tokens < 1.53
    assert load.tokens == longest or load.requests <= 13
    assert load.seconds == pytest.approx(load.requests * seconds * load.tokens / tokens, rel=0.02)


@pytest.mark.parametrize(
    "listed", [7, "m", [["m"]], [{"name": "m"}], [{"id": "m", "max_model_len": "long"}], [{"id": ["m"]}]]
)
def test_a_list_of_models_with_another_format_is_an_error(listed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine()
    engine.listed = listed
    with serving(engine) as url:
        assert run(["verify", "--url", url, *FEW]) == 1
    assert "/models has an unexpected format" in capsys.readouterr().err


def test_a_stream_whose_chunks_have_an_empty_error_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine()
    engine.chunk = {"error": None}
    with serving(engine) as url:
        assert run(["verify", "--url", url, "--only", "smoke.stream"]) == 0
    capsys.readouterr()


def test_a_resumed_run_performs_checks_that_needed_another_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, reference = tmp_path / "state.json", tmp_path / "reference.json"
    with serving(Engine()) as url:
        command = ["verify", "--quick", "--limit", "5m", "-o", "json", "--url", url, "--resume", str(file)]
        assert run([*command, "--only", "oracle.reference", "--export", str(reference)]) == 0
        assert statuses(document(capsys)) == {"oracle.reference": "skipped"}
        assert run([*command, "--only", "oracle.reference", "--reference", str(reference)]) == 0
    assert statuses(document(capsys)) == {"oracle.reference": "ok"}


def test_the_file_keeps_results_that_a_later_run_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "state.json"
    with serving(Engine()) as url:
        command = ["verify", "--url", url, "--resume", str(file)]
        assert run([*command, *FEW]) == 0
        assert run([*command, "--only", "smoke.models"]) == 0
    assert set(statuses(json.loads(file.read_text()))) == {"smoke.models", *FEW[1::2]}
    assert capsys.readouterr().out.count("smoke.chat") == 1


def test_a_file_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, engine = tmp_path / "state.json", Engine()
    with serving(engine) as url:
        command = ["verify", "--url", url, "--resume", str(file), *FEW]
        assert run(command) == 0
        engine.listed = [{"id": "other"}, *engine.listed]
        engine.check_model = lambda name: None  # type: ignore[method-assign]
        assert run(command) == 2
    assert "'m', and this run is of 'other'" in capsys.readouterr().err


def test_output_of_the_endpoint_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = line(Result("smoke.chat", Status.FAILED, "it has \x1b[2J", evidence=["a\x9bb\x07", "c\nd"]))
    assert text.splitlines()[1:] == [f"{'':<39}a\ufffdb\ufffd", f"{'':<39}c d"]
    assert text.isprintable() or not any(ord(char) < 32 and char != "\n" for char in text)


@pytest.mark.parametrize(
    "document",
    [
        b"[" * 100_000,
        b'{"choices": []}',
        b'{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens": "abc"}}',
        b"<html>",
        b"\xff\xfe",
    ],
)
def test_a_broken_answer_is_a_defect(document: bytes) -> None:
    class Session:
        def request(self, *_: Any, **__: Any) -> Any:
            return Response()

    class Response:
        status = 200

        async def __aenter__(self) -> Response:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        @property
        def content(self) -> Response:
            return self

        async def iter_any(self) -> Any:
            yield document

    async def ask() -> None:
        await Client(Session(), Address("http://x/v1"), seconds=1.0).complete("a")  # type: ignore[arg-type]

    with pytest.raises(Defect):
        asyncio.run(ask())


def test_log_probabilities_without_other_tokens_are_read() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": None}
    choice = {"text": "a", "finish_reason": "stop", "logprobs": logprobs}
    (token,) = read_document({"choices": [choice], "usage": {"total_tokens": 1}}).tokens
    assert (token.text, token.top, token.margin()) == ("a", {"a": -1.0}, float("inf"))


def test_code_that_is_nested_too_deeply_does_not_compile() -> None:
    assert "does not compile" in language_problem("code", "-" * 100_000 + "1")


def test_the_time_limit_makes_the_run_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine(delay=1.0)) as url:
        assert run(["verify", "--url", url, "--limit", "8s", "-o", "json"]) == 3
    found = document(capsys)
    assert {each.get("reason") for each in found["results"] if each["status"] == "skipped"} >= {"TimeLimit"}
    assert found["seconds"] < 60


def test_junit_has_every_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "junit.xml"
    with serving(Engine("replacement characters")) as url:
        only = ("--only", "generation.code-off", "--only", "oracle.reference", *FEW)
        assert run(["verify", "--url", url, "--junit", str(file), *only]) == 1
    suite = ET.parse(file).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("5", "1", "1")
    kinds = {case.get("name"): [part.tag for part in case] for case in suite}
    assert kinds["code-off"] == ["failure"]
    assert kinds["reference"] == ["skipped"]
    capsys.readouterr()


@pytest.mark.parametrize("weak", [False, True])
def test_a_reference_of_one_endpoint_fits_the_same_and_not_another(
    weak: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "reference.json"
    with serving(Engine(weak=weak, noise=0.005)) as url:
        assert run(["verify", "--url", url, "--export", str(file), "--only", "smoke.chat"]) == 0
        reference = json.loads(file.read_text())
        assert reference["format"] == "dsv4-logprobs/1"
        assert 0 < reference["noise"] < 0.02
        assert run(["verify", "--url", url, "--reference", str(file), "--only", "oracle"]) == 0
    capsys.readouterr()
    with serving(Engine("swapped expert", weak=weak)) as url:
        assert run(["verify", "--url", url, "--reference", str(file), "--only", "oracle.reference", "-o", "json"]) == 1
    with serving(Engine(weak=not weak)) as url:
        command = ["verify", "--url", url, "--reference", str(file), "--only", "oracle.reference"]
        assert run(command) == 1
    assert "another tokenizer" in capsys.readouterr().out


def test_a_capable_vocabulary_with_useless_answers_is_a_defect(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Engine("broken weights")) as url:
        assert run(["verify", "--url", url, "--only", "smoke.capability"]) == 1
        assert run(["verify", "--url", url, "--only", "smoke.capability", "--weak"]) == 0
    capsys.readouterr()


def test_the_key_reaches_the_endpoint_and_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, state = tmp_path / "key", tmp_path / "state.json"
    key.write_text("canary-key-1234\n")
    engine = Engine(key="canary-key-1234")
    with serving(engine) as url:
        assert run(["verify", "--url", url, *FEW]) == 3
        assert "--key-file" in capsys.readouterr().err
        reports = ["--resume", str(state), "--junit", str(tmp_path / "junit.xml"), "--export", str(tmp_path / "e.json")]
        assert run(["verify", "--url", url, "--key-file", str(key), *FEW, *reports]) == 0
    captured = capsys.readouterr()
    written = "".join(path.read_text() for path in tmp_path.iterdir() if path != key)
    assert "canary" not in captured.out + captured.err + written


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["name", "--url", "http://h"], "--url"),
        (["--model", "m"], "--model"),
        (["--key-file", "k"], "--key-file"),
        (["--url", "h:8000"], "--url"),
        (["--url", "http://h/?a=b"], "--url"),
        (["--url", "http://h", "--only", "smok"], "--only"),
        (["--url", "http://h", "--limit", "0s"], "--limit"),
        (["--url", "http://h", "--timeout", "soon"], "--timeout"),
        (["--url", "http://h", "--reference", "r", "--against", "http://g"], "--against"),
        (["--url", "http://h", "--against-key-file", "k"], "--against"),
        (["--url", "http://h", "--key-file", "/none/k"], "/none/k"),
        (["--url", "http://h", "--reference", "/none/r"], "/none/r"),
        (["--url", "http://h", "--junit", "/none/j.xml"], "/none"),
    ],
)
def test_wrong_options_are_bad_input(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", *options]) == 2
    assert named in capsys.readouterr().err


JUNK = ["", "[]", "{}", "{", '{"format": "dsv4-logprobs/9"}', '{"results": 1}', "null", '{"url": "x", "quick": 1}']


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("option", ["--reference", "--resume"])
def test_a_file_of_another_kind_is_refused_and_kept(
    option: str, junk: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.json"
    file.write_text(junk)
    assert run(["verify", "--url", "http://127.0.0.1:9", option, str(file)]) == 2
    assert option in capsys.readouterr().err
    assert file.read_text() == junk


def cut(reference: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the reference without one value, at a different place for each number."""
    case = dict(reference["cases"][0])
    changed = {**reference, "cases": [case]}
    paths: list[tuple[dict[str, Any], str]] = [(changed, key) for key in ("format", "model", "top", "noise", "cases")]
    paths += [(case, key) for key in ("name", "prompt", "prompt_token_ids", "token_ids", "scored")]
    holder, key = paths[number]
    del holder[key]
    return changed


@pytest.mark.parametrize("number", range(10))
def test_a_damaged_reference_is_refused(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"token_id:5": -0.1}
    case = {"name": "a", "prompt": "b", "prompt_token_ids": [1], "token_ids": [5], "scored": [None, row]}
    reference = {"format": "dsv4-logprobs/1", "model": "m", "top": 8, "noise": 0.0, "cases": [case]}
    file = tmp_path / "reference.json"
    file.write_text(json.dumps(cut(reference, number)))
    assert run(["verify", "--url", "http://127.0.0.1:9", "--reference", str(file)]) == 2
    assert "--reference" in capsys.readouterr().err
