from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dsv4_operator.cli import main

HEAVY = ("aiohttp", "httpx", "yaml", "pydantic", "rich", "asyncio", "dsv4_operator.api")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command 'nope'; see `dsv4 --help`"),
        (["up"], "Missing argument"),
        (["down", "x", "--all"], "--all and the name 'x' are mutually exclusive; use one of them"),
        (["up", "f", "--timeout", "soon"], '--timeout: "soon" is not a duration'),
        (["up", "f", "--timeout", "0s"], "--timeout: '0s' is not a positive duration"),
        (["logs", "-c", "x"], "--component 'x' is unknown; use one of agent, ray, vllm, loop, all"),
        (["why", "-o", "xml"], "'xml' is not one of"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_help_names_the_exit_codes_and_loads_little() -> None:
    code = "import sys; from dsv4_operator.cli import main; main.run(['--help']); "
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Exit codes: 0 all went well; 1 it failed; 2" in found.stdout
    assert found.stdout.splitlines()[-1] == "[]"


def test_no_arguments_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([]) == 0
    assert capsys.readouterr().out.startswith("Usage: ")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["version"]) == 0
    assert capsys.readouterr().out.startswith("dsv4 ")
    assert main.run(["version", "-o", "json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["version"]


def test_why_as_json(root: Path, saved: object, make: object, capsys: pytest.CaptureFixture[str]) -> None:
    saved(make.status())  # type: ignore[operator,attr-defined]
    assert main.run(["why", "-o", "json", "--state-dir", str(root)]) == 0
    assert json.loads(capsys.readouterr().out)["phase"] == "Stopped"


def test_logs_of_a_name_and_a_rank(root: Path, saved: object, capsys: pytest.CaptureFixture[str]) -> None:
    state = saved()  # type: ignore[operator]
    for rank in (0, 1):
        state.member(1, rank).mkdir(parents=True)
        (state.member(1, rank) / "agent.log").write_text(f"{rank}\n")
    for words in (["1"], ["nano", "1"], ["1", "--name", "nano"]):
        assert main.run(["logs", *words, "-c", "agent", "--state-dir", str(root)]) == 0
        assert capsys.readouterr().out == "1\n"


def test_the_dashboard_of_this_machine(
    root: Path, saved: object, held: object, make: object, capsys: pytest.CaptureFixture[str]
) -> None:
    class Quiet(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        state = saved(make.status(ray_dashboard=url))  # type: ignore[operator,attr-defined]
        state.token().write_text("t0ken\n")
        assert main.run(["dashboard", "--state-dir", str(root)]) == 1
        assert capsys.readouterr().err == "error: nano has no dashboard now: it is Stopped\n"
        held(state)  # type: ignore[operator]
        assert main.run(["dashboard", "--state-dir", str(root)]) == 0
        assert capsys.readouterr().out == f"dashboard   {url}\ntoken       t0ken\n"
        assert main.run(["dashboard", "--group", "1", "--state-dir", str(root)]) == 2
        said = "error: --group 1: only the dashboard of group 0 has a port on this machine; write 0\n"
        assert capsys.readouterr().err == said
        server.shutdown()


@pytest.mark.parametrize("verb", ["restart", "suspend", "resume"])
def test_verbs_for_clusters_are_refused_with_the_local_command(
    verb: str, root: Path, saved: object, capsys: pytest.CaptureFixture[str]
) -> None:
    saved()  # type: ignore[operator]
    assert main.run([verb, "--state-dir", str(root)]) == 2
    assert "`dsv4 down nano` ends nano, and `dsv4 up FILE` starts it anew" in capsys.readouterr().err


def test_a_shell_completes_names(root: Path, saved: object) -> None:
    saved()  # type: ignore[operator]
    words = f"dsv4 why --state-dir {root} n"
    asked = {"_DSV4_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "4"}
    code = "import sys; from dsv4_operator.cli.main import main; sys.argv = ['dsv4']; main()"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **asked}
    )
    assert found.stdout == "nano\n"


def test_the_version_as_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dsv4 0.")
