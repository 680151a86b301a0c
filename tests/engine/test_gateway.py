"""Requests during the death of a real engine: the gateway's guarantees, with vLLM and the nano model.

One deployment serves all tests of this file, in order; the last one ends it. Its API requires keys, and its user has
tokens in the environment: after its life every output is searched for these marked secrets.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dsv4_operator.backends.local.supervisor import read_report
from dsv4_runtime.engine import token_auth
from dsv4_testkit.browser import CHROMIUM, chromium, until
from dsv4_testkit.gateway_clients import CONTEXT, SECONDS, TOKENS, Asked, Chat, same
from dsv4_testkit.harness import MARKER, Deployment, unix

pytestmark = pytest.mark.engine

LOGPROBS = {"/v1/completions": {"logprobs": 2}, "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2}}
"""Requests the two likeliest tokens at each position; such a stream is not continued."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": TOKENS}
KEY, TOKEN, STORE = "canary-of-callers-7f3a", "hf_canaryOfTheHub7f3acanaryOfTheHub7f3a", "canary-of-the-store-7f3a"
CANARIES = [word.encode() for word in (KEY, TOKEN, STORE)]


@pytest.fixture(scope="module")
def deployment(weights: Path) -> Iterator[Deployment]:
    environment = {"HF_TOKEN": TOKEN, "AWS_SECRET_ACCESS_KEY": STORE}
    found = Deployment(nodes=1, restarts=10, environment=environment, weights=weights)
    manifest = yaml.safe_load(found.file.read_text())
    manifest["spec"]["gateway"] = {"apiKeys": {"secretKeyRef": {"name": "callers", "key": "keys"}}}
    found.file.write_text(yaml.safe_dump(manifest))
    keys = found.root / "secrets" / "callers" / "keys"
    keys.parent.mkdir(parents=True)
    keys.touch(mode=0o600)
    keys.write_text(f"# whose\n{KEY}\n")
    found.key = KEY
    found.up()
    yield found
    found.destroy()


def kill_engine(deployment: Deployment) -> float:
    engine, killed = deployment.pid(0, "engine-core"), time.time()
    os.kill(engine, signal.SIGKILL)
    return killed


STREAMED = {
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me of the sea."}]},
}


@contextlib.contextmanager
def without_loop(deployment: Deployment) -> Iterator[None]:
    """Stop the processes of `dsv4 up`, the loop and its supervisor, during the block."""
    supervisor = int((deployment.directory / "lock").read_text())
    report = read_report(supervisor)
    assert report is not None
    assert report.loop is not None
    for process in (supervisor, report.loop):
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in (report.loop, supervisor):
            os.kill(process, signal.SIGCONT)


def test_verify_finds_no_defect(deployment: Deployment) -> None:
    # The time of a quick run assumes an otherwise idle machine; this one runs other tests.
    done = deployment.run("verify", deployment.name, "--quick", "--limit", "5m", "-o", "json", timeout=330)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    print(f"\n{found['summary']} in {found['seconds']:.0f} s")
    results = {each["name"]: each for each in found["results"]}
    for name in ("smoke.stream", "smoke.stop", "smoke.template", "smoke.seed", "oracle.self", "context.prefix-cache"):
        assert results[name]["status"] == "ok", results[name]
    assert results["smoke.capability"]["reason"] == "ModelTooWeak"
    skipped = {each["reason"] for each in results.values() if each["status"] == "skipped"}
    assert skipped <= {"ModelTooWeak", "NoReference", "Inconclusive"}


def test_greedy_streams_continue_exactly(deployment: Deployment) -> None:
    more = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    whole = {path: Asked(deployment, path, ask | more | LOGPROBS[path]) for path, ask in STREAMED.items()}
    whole_chat = Chat(deployment, **LOGPROBS["/v1/chat/completions"]).answered()
    for asked in whole.values():
        assert asked.answered().chunks[-1] == "[DONE]"
    tells = {path: threading.Event() for path in STREAMED}
    broken = {path: Asked(deployment, path, ask | more, tells[path]) for path, ask in STREAMED.items()}
    chat = Chat(deployment)
    assert all(tell.wait(SECONDS) for tell in (*tells.values(), chat.started))
    with without_loop(deployment):
        # Neither the restart in place nor the gateway needs the loop, which plans and fences.
        killed = kill_engine(deployment)
        for asked in broken.values():
            asked.answered()
        chat.answered()
    for path, asked in broken.items():
        found, wanted = asked.chunks, whole[path].chunks
        print(f"\n{path}: {whole[path].seconds:.1f} s whole, {asked.seconds:.1f} s over a death")
        assert same(asked.text, whole[path].text, whole[path].margins)
        assert (found[-1], found.count("[DONE]")) == ("[DONE]", 1)
        assert found[-2]["usage"] == wanted[-2]["usage"]
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in found[:-1]}) == 1
        assert b'token_ids":[' not in asked.raw
    assert same(chat.text, whole_chat.text, whole_chat.margins)
    assert (chat.finish, chat.tokens) == (whole_chat.finish, whole_chat.tokens) == ("length", CONTEXT)
    status = deployment.wait("Serving", since=killed)
    assert status["groups"][0]["lastFailure"]["cause"] == "EngineCoreDied"


def page_of(deployment: Deployment) -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{deployment.api}/dsv4/status.json", headers=deployment.headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.loads(answer.read()))


def quiet_page(deployment: Deployment) -> dict[str, Any]:
    """Return the page's group once it has the reports of an engine without requests."""
    deadline = time.monotonic() + 60
    while True:
        # The head's first report can arrive after the first document, and a report is shared for some seconds.
        (found,) = page_of(deployment)["groups"]
        complete = "memory" in found["members"][0] and "load" in found
        if found["verdict"]["health"] == "Healthy" and complete and not found["load"]["running"]:
            return dict(found)
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


@contextlib.asynccontextmanager
async def page(deployment: Deployment, deaths: int) -> AsyncIterator[Any]:
    """Yield a tab with the status page that shows `deaths`, or None without a browser."""
    if CHROMIUM is None:
        yield None
        return
    async with chromium() as browser:
        tab = await browser.new_page()
        await tab.goto(f"http://127.0.0.1:{deployment.api}/dsv4/status")
        await tab.fill("#key", KEY)
        await tab.press("#key", "Enter")
        await until(tab, f"document.querySelectorAll('.timeline > li').length === {deaths}")
        yield tab


async def test_one_death_every_other_kind_of_request_and_the_status_page(deployment: Deployment) -> None:
    ask = {"prompt": "Once upon a time", **GREEDY}
    whole = json.loads(Asked(deployment, "/v1/completions", ask).answered().raw)
    tell, before, shown = threading.Event(), deployment.group(), quiet_page(deployment)
    assert shown["phase"] == "Serving"
    assert (shown["budget"]["allowed"], shown["cache"]["tokens"] > 0) == (10, True)
    assert shown["members"][0]["memory"]["available"] > 0
    async with page(deployment, len(shown["failures"])) as tab:
        asked = {
            "whole answer": Asked(deployment, "/v1/completions", ask),
            "seeded": Asked(
                deployment, "/v1/completions", {**ask, "stream": True, "temperature": 1.0, "seed": 7}, tell
            ),
            "unseeded": Asked(deployment, "/v1/completions", {**ask, "stream": True, "temperature": 1.0}),
        }
        assert tell.wait(SECONDS)
        killed = kill_engine(deployment)
        deadline = time.monotonic() + 60
        while deployment.peek()["groups"][0]["phase"] == "Serving" and time.monotonic() < deadline:
            time.sleep(0.1)
        asked["held"] = Asked(deployment, "/v1/completions", {**ask, "max_tokens": 4})
        if tab is not None:
            await the_page_shows_a_death_and_its_recovery(tab, len(shown["failures"]) + 1, killed)
    for name, request in asked.items():
        request.answered()
        print(f"\n{name}: {request.status} after {request.seconds:.1f} s")
        assert request.status == 200
    assert json.loads(asked["whole answer"].raw)["choices"][0]["text"] == whole["choices"][0]["text"]
    assert json.loads(asked["held"].raw)["usage"]["completion_tokens"] == 4
    *delivered, last = asked["seeded"].chunks
    assert "seed" in last["error"]["message"]
    assert delivered
    assert "[DONE]" not in delivered
    assert asked["unseeded"].chunks[-1] == "[DONE]"
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in asked["unseeded"].chunks[:-1]]
    assert finishes.count("length") == 1
    after = deployment.wait("Serving", since=killed)["groups"][0]
    failure = after["lastFailure"]
    assert (failure["cause"], failure["culpritRank"], failure["level"]) == ("EngineCoreDied", 0, 1)
    assert unix(failure["time"]) - killed < 3.0
    assert (after["incarnation"], after["totalRestarts"]) == (before["incarnation"], before["totalRestarts"] + 1)
    why = deployment.run("why", deployment.name, timeout=120).stdout
    assert "EngineCoreDied" in why
    assert len(why.splitlines()) <= 10
    (told,) = page_of(deployment)["groups"]
    failure = told["failures"][-1]
    assert (failure["cause"], failure["level"], failure["generation"]) == ("EngineCoreDied", 1, shown["generation"])
    assert failure["time"] - killed < 5.0
    assert failure["evidence"]
    assert told["budget"]["left"] == shown["budget"]["left"] - 1


async def the_page_shows_a_death_and_its_recovery(tab: Any, deaths: int, killed: float) -> None:
    await until(tab, f"document.querySelectorAll('.timeline > li').length === {deaths}")
    print(f"\nthe page shows the death {time.time() - killed:.1f} s after the kill")
    shown = await tab.inner_text(".timeline > li:first-child")
    assert "EngineCoreDied" in shown
    assert "not recovered yet" in shown
    await until(tab, "document.querySelector('.timeline > li .badge.ok') !== null", SECONDS)
    assert await tab.inner_text("#phase") in ("Serving", "Degraded", "Recovering")


# Prints a JSON list with status, headers and body of the response to each request, unchanged.
_ASK = """
import http.client, json, sys
found = []
for base, path, body, own in json.load(sys.stdin):
    connection = http.client.HTTPConnection(base, timeout=60)
    connection.request("POST", path, body, {"Content-Type": "application/json", "X-Request-Id": "the-same", **own})
    answer = connection.getresponse()
    found.append([answer.status, answer.getheaders(), answer.read().decode()])
json.dump(found, sys.stdout)
"""


# The gateway uses its own framing and adds the request id to its response; the time differs.
_OF_THE_CONNECTION = ("transfer-encoding", "content-length", "connection", "date", "x-request-id")


def test_healthy_answers_are_vllms_byte_for_byte(deployment: Deployment) -> None:
    stream = {"model": deployment.name, **GREEDY, "max_tokens": 12, "stream": True}
    bodies = [(path, json.dumps({**stream, **ask})) for path, ask in STREAMED.items()]
    bodies += [(path, json.dumps({**stream, **ask, "stream": False})) for path, ask in STREAMED.items()]
    bodies += [("/v1/completions", '{"model": "nano", "prompt": 7.5}'), ("/v1/completions", "{"), ("/v1/nothing", "{}")]
    loop = int((deployment.directory / "lock").read_text())

    def ask(base: str, prefix: list[str], own: Mapping[str, str]) -> list[Any]:
        asked = json.dumps([(base, *body, own) for body in bodies])
        command = [*prefix, sys.executable, "-c", _ASK]
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120, check=True)
        found = []
        for status, headers, body in json.loads(done.stdout):
            kept = [header for header in headers if header[0].lower() not in _OF_THE_CONNECTION]
            found.append([status, kept, re.sub(r'"created":\d+', '"created":0', body)])
        return found

    inside, token = ["nsenter", f"--net=/proc/{loop}/ns/net"], (deployment.directory / "token").read_text().strip()
    assert {status for status, _, _ in ask("10.88.0.10:8000", inside, {})} == {401}, "vLLM's port is the gateway's"
    direct = ask("10.88.0.10:8000", inside, token_auth.headers(token))
    through = ask(f"127.0.0.1:{deployment.api}", [], deployment.headers)
    assert [status for status, _, _ in direct] == [200, 200, 200, 200, 400, 400, 404]
    assert direct[0][2].count("data: ") == 13
    assert through == direct


def metrics(deployment: Deployment) -> str:
    """Return the metrics of both gateways: the one that is asked omits another that does not answer within a second."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{deployment.api}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
        if text.count("\ndsv4_gateway_active{") == 2:
            return text
        assert time.monotonic() < deadline, text


def test_a_client_that_leaves_ends_its_work_in_vllm(deployment: Deployment) -> None:
    def figures() -> dict[str, float]:
        lines = [line for line in metrics(deployment).splitlines() if not line.startswith("#")]
        return {line.partition("{")[0].partition(" ")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    before = figures()
    body = json.dumps({"model": deployment.name, "prompt": "Once", **GREEDY, "max_tokens": 900, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", deployment.api, timeout=60)
    connection.request("POST", "/v1/completions", body, deployment.headers)
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    # The gateway shares one read of vLLM's metrics for a second.
    asked = time.monotonic()
    while figures()["vllm:num_requests_running"] != 1:
        assert time.monotonic() - asked < 3
        time.sleep(0.1)
    answer.close()
    connection.close()
    left = time.monotonic()
    while figures()["vllm:num_requests_running"]:
        assert time.monotonic() - left < 5
        time.sleep(0.1)
    assert figures()["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] < 300


def test_the_gateways_metrics_are_served_with_those_of_vllm(deployment: Deployment) -> None:
    text = metrics(deployment)
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
        assert f"\nvllm:{name}{{" in text
    assert total(text, "continued_total") == 4
    assert total(text, "replayed_total") >= 1
    assert total(text, "cut_total") == 1


def total(text: str, name: str, labels: str = "") -> float:
    """Return a metric's sum over both gateways, of the samples with `labels`."""
    lines = [line for line in text.splitlines() if line.startswith(f"dsv4_gateway_{name}{{") and labels in line]
    assert len(lines) == 2, lines
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


# Requests a drain from the agent of rank 0; the token comes from standard input.
_DRAIN = """
import http.client, sys
connection = http.client.HTTPConnection("10.88.0.10", 8090, timeout=10)
connection.request("POST", "/v1/drain?seconds=120", b"", {"Authorization": "Bearer " + sys.stdin.read()})
print(connection.getresponse().read().decode())
"""


def drain(deployment: Deployment) -> dict[str, Any]:
    """Return the agent's response to the request before a planned end."""
    loop, token = int((deployment.directory / "lock").read_text()), (deployment.directory / "token").read_text().strip()
    command = ["nsenter", f"--net=/proc/{loop}/ns/net", sys.executable, "-c", _DRAIN]
    done = subprocess.run(command, input=token, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def closed_to_new_requests(deployment: Deployment) -> None:
    """Wait until both gateways hold new requests."""
    deadline = time.monotonic() + 10
    while total(metrics(deployment), "engine_state", 'state="healthy"') > 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_draining_engine_completes_its_open_requests(deployment: Deployment) -> None:
    before = deployment.group()["incarnation"]
    tell = threading.Event()
    # Such a stream cannot be continued: random draws are counted from the seed on.
    body = {"prompt": "Once", **GREEDY, "max_tokens": 480, "temperature": 1.0, "seed": 7, "stream": True}
    asked = Asked(deployment, "/v1/completions", body, tell)
    assert tell.wait(SECONDS)
    with without_loop(deployment):
        # The loop did not request this, so it would declare the engine dead and end it.
        assert drain(deployment)["over"] is False
        assert asked.is_alive()
        # A request that arrives before the agent's report is one more open request, and completes.
        closed_to_new_requests(deployment)
        held = Asked(deployment, "/v1/completions", {"prompt": "Once", **GREEDY, "max_tokens": 4})
        *told, last = asked.answered().chunks
        assert last == "[DONE]"
        assert [chunk["choices"][0]["finish_reason"] for chunk in told].count("length") == 1
        ended, deadline = time.monotonic(), time.monotonic() + 30
        while not (found := drain(deployment))["over"]:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        print(f"\nover {time.monotonic() - ended:.1f} s after the last open request")
        assert found == {"over": True, "open": 0}
        assert held.is_alive(), f"a later request was not held: {held.status} {held.raw!r}"
    assert json.loads(held.answered().raw)["usage"]["completion_tokens"] == 4
    assert deployment.group()["incarnation"] == before + 1


def test_a_gateway_that_is_killed_is_back_within_a_second(deployment: Deployment) -> None:
    seconds: list[float] = []
    # The best of several attempts, for a busy machine.
    while len(seconds) < 4 and min(seconds, default=1.0) >= 1.0:
        old, other = gateways(deployment)
        old.kill()
        killed = time.monotonic()
        found = gateways(deployment, after=old.pid)
        seconds.append(time.monotonic() - killed)
        assert other in found
    assert min(seconds) < 1.0
    assert {process.ppid() for process in found} == {int((deployment.directory / "lock").read_text())}
    assert deployment.complete()["usage"]["completion_tokens"] == 4


def test_a_stopped_gateway_costs_no_request(deployment: Deployment) -> None:
    stopped, other = gateways(deployment)
    stopped.suspend()
    begun = time.monotonic()
    asked = [Asked(deployment, "/v1/completions", {"prompt": "Once", **GREEDY, "max_tokens": 4}) for _ in range(8)]
    for one in asked:
        assert json.loads(one.answered().raw)["usage"]["completion_tokens"] == 4
    while stopped.status() == psutil.STATUS_STOPPED:
        assert time.monotonic() - begun < 60
        time.sleep(0.02)
    print(f"\ncontinued within {time.monotonic() - begun:.1f} s")
    assert gateways(deployment) == [stopped, other]


def test_a_killed_loop_costs_no_request_and_the_next_one_continues(deployment: Deployment) -> None:
    supervisor, before = int((deployment.directory / "lock").read_text()), deployment.group()
    report = read_report(supervisor)
    assert report is not None
    assert report.loop is not None
    body = {"prompt": "Once upon a time", **GREEDY, "stream": True}
    tell = threading.Event()
    asked = Asked(deployment, "/v1/completions", body, tell)
    assert tell.wait(SECONDS)
    os.kill(report.loop, signal.SIGKILL)
    killed = kill_engine(deployment)
    while (found := read_report(supervisor)) is None or found.loop in (None, report.loop) or found.beat < killed:
        assert time.time() - killed < 15.0
        time.sleep(0.02)
    print(f"\nthe next loop works {time.time() - killed:.1f} s after the kill")
    assert asked.answered().chunks[-1] == "[DONE]"
    status = deployment.wait("Serving", since=killed)
    after = status["groups"][0]
    assert (after["incarnation"], after["engineGeneration"]) == (before["incarnation"], before["engineGeneration"] + 1)
    why = deployment.run("why", deployment.name).stdout
    assert "the loop was killed by signal 9" in why
    order = [why.index(f"  {word} ") for word in ("loop", "detected", "cause", "evidence", "repair", "serving")]
    assert order == sorted(order), why
    # The status is saved before the event is logged.
    deadline = time.monotonic() + 60
    while (log := deployment.log()).rfind("GroupRecovered") < log.rfind("EngineDead"):
        assert time.monotonic() < deadline, log
        time.sleep(0.1)
    order = [log.rindex(word) for word in ("adopted rank 0", "EngineDead", "EngineRestarting", "GroupRecovered")]
    assert order == sorted(order), log


def status_with(deployment: Deployment, key: str | None) -> int:
    """Return the status of a completion request with `key`."""
    about = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    body = b'{"model": "nano", "prompt": "Hello", "max_tokens": 2, "temperature": 0.0}'
    request = urllib.request.Request(f"http://127.0.0.1:{deployment.api}/v1/completions", body, about)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def commands(deployment: Deployment) -> Iterator[str]:
    """Yield the command lines of all processes of the deployment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == str(deployment.directory):
                yield " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def with_canaries(text: bytes) -> list[bytes]:
    return [word for word in CANARIES if word in text]


def files(deployment: Deployment) -> dict[Path, tuple[list[bytes], int]]:
    """Return the canaries in every file of the deployment, its engine's and Ray's too, and its permissions."""
    deadline = time.monotonic() + 60
    while True:
        # Files are replaced as a whole: a partial one may be renamed between two steps.
        with contextlib.suppress(FileNotFoundError):
            found = [path for path in deployment.directory.rglob("*") if path.is_file() and not path.is_symlink()]
            return {path: (with_canaries(path.read_bytes()), path.stat().st_mode & 0o777) for path in found}
        assert time.monotonic() < deadline


def test_a_life_with_secrets_leaves_none_anywhere(deployment: Deployment, tmp_path: Path) -> None:
    assert [status_with(deployment, key) for key in (None, "wrong", KEY)] == [401, 401, 200]

    # The engine's own processes do not have them; only the processes that fetch weights and check keys do.
    engine = psutil.Process(deployment.pid(0, "engine-core"))
    assert with_canaries(Path(f"/proc/{engine.pid}/environ").read_bytes()) == []
    shown = list(commands(deployment))
    assert len(shown) > 5
    assert with_canaries("\n".join(shown).encode()) == []

    # The deaths before have created evidence, and the requests during them entries in the gateway's log.
    assert deployment.group()["history"]
    archive = tmp_path / "evidence.tar.gz"
    for words in (
        ("status", "nano", "-o", "yaml"),
        ("why", "nano"),
        ("logs", "nano"),
        ("plan", str(deployment.file), "-o", "yaml"),
        ("evidence", "nano", "--output", str(archive)),
    ):
        done = deployment.run(*words)
        assert done.returncode == 0, (words, done.stderr)
        assert with_canaries((done.stdout + done.stderr).encode()) == [], words
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    with tarfile.open(archive) as packed:
        names = packed.getnames()
        assert any("evidence" in name for name in names)
        assert [name for name in names if with_canaries(packed.extractfile(name).read())] == []  # type: ignore[union-attr]

    found = files(deployment)
    assert any(path.name == "gateway.log" for path in found)
    assert [path for path, (canaries, _) in found.items() if canaries] == []
    # Other users can neither enter the directory nor read the loop's own files.
    assert stat.S_IMODE(deployment.directory.stat().st_mode) == 0o700
    own = {path: mode for path, (_, mode) in found.items() if path.parent == deployment.directory}
    assert [path for path, mode in own.items() if mode & 0o077] == []


def test_down_completes_open_requests(deployment: Deployment) -> None:
    tell = threading.Event()
    body = {"prompt": "Once", **GREEDY, "stream": True}
    asked = Asked(deployment, "/v1/completions", body, tell)
    assert tell.wait(SECONDS)
    deployment.run("down", deployment.name, timeout=120)
    assert asked.answered().chunks[-1] == "[DONE]"
    assert deployment.remains() == []


def gateways(deployment: Deployment, after: int | None = None) -> list[psutil.Process]:
    """Return both gateways' processes without `after`, which was killed and may take a moment to end."""
    supervisor = psutil.Process(int((deployment.directory / "lock").read_text()))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = []
        for process in supervisor.children():
            # A process that was just killed is a zombie until it is reaped.
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid != after and "dsv4_runtime.gateway.main" in process.cmdline():
                    found.append(process)
        if len(found) == 2:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no two gateways within a minute:\n{deployment.log()}")
