from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli.output import CommandError, DocumentFormat, LogComponent, LogOptions, log_time
from dsv4_operator.cli.sources import local
from dsv4_testkit.errors import raises_naming


def request(**more: Any) -> LogOptions:
    return LogOptions(
        **{
            "rank": None,
            "component": LogComponent.ALL,
            "follow": False,
            "tail": None,
            "form": None,
            "colour": False,
            **more,
        }
    )


def write(state: DeploymentState, incarnation: int, rank: int, component: str, text: str, group: int = 0) -> None:
    directory = state.member(incarnation, rank, group)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{component}.log").open("a") as file:
        file.write(text)


@pytest.fixture
def state(saved: Callable[..., DeploymentState]) -> DeploymentState:
    found = saved()
    write(found, 1, 0, "agent", "old\n")
    write(found, 2, 0, "agent", "\x1b[32mone\x1b[0m\ntwo\n")
    write(found, 2, 0, "vllm", "load 10%\rload 100%\nready")
    write(found, 2, 1, "ray", "joined\n")
    return found


def test_everything_of_the_latest_incarnation(state: DeploymentState, capsys: pytest.CaptureFixture[str]) -> None:
    local.print_logs(state, request())
    assert capsys.readouterr().out == (
        "[0 agent] one\n[0 agent] two\n[0 vllm] load 100%\n[0 vllm] ready\n[1 ray] joined\n"
    )


AGENT = "2026-11-25 20:27:27,520 INFO dsv4_runtime.agent.state Staging -> Joining: starting Ray"
RAY = "2026-11-25 20:27:30,127\tINFO usage_lib.py:448 -- Usage stats collection is disabled."
RAYLET = "[2026-11-25 20:27:30,128 W 13 13] network_util.cc:330: Failed to determine local IP"
VLLM = "(APIServer pid=3) INFO 11-25 20:27:41 [api_utils.py:347] version 0.33.0"
DEAD = "2026-11-25 20:29:00,100 INFO dsv4_runtime.agent.state Serving -> Restarting: EngineCoreDied"


def test_the_lines_of_all_components_come_by_time(
    saved: Callable[..., DeploymentState], capsys: pytest.CaptureFixture[str]
) -> None:
    found = saved()
    # A line without a time belongs to the previous line with a time, or else to the first one after it.
    write(found, 1, 0, "vllm", f"a warning\n{VLLM}\nTraceback\n  frame\n(APIServer pid=3) INFO 11-25 20:29:01 x\n")
    write(found, 1, 0, "agent", f"{AGENT}\n{DEAD}\n")
    write(found, 1, 1, "ray", f"{RAY}\n{RAYLET}\n")
    local.print_logs(found, request())
    assert capsys.readouterr().out.splitlines() == [
        f"[0 agent] {AGENT}",
        f"[1 ray] {RAY}",
        f"[1 ray] {RAYLET}",
        "[0 vllm] a warning",
        f"[0 vllm] {VLLM}",
        "[0 vllm] Traceback",
        "[0 vllm]   frame",
        f"[0 agent] {DEAD}",
        "[0 vllm] (APIServer pid=3) INFO 11-25 20:29:01 x",
    ]


@pytest.mark.parametrize("line", [AGENT, RAY, RAYLET, VLLM, DEAD])
def test_times_of_every_component_sort_across_a_year(line: str) -> None:
    moved = {"12-31 23:59:59": 1, "01-01 00:00:01": 1, "11-25 20:00:00": 12}
    times = []
    for when, month in moved.items():
        text = re.sub(r"11-25 \d\d:\d\d:\d\d", when, line)
        times.append(log_time(text.encode(), month))
    assert None not in times
    assert times[0] < times[1]
    assert log_time(b"no time", 1) is None


def test_groups_are_named_where_there_are_several(state: DeploymentState, capsys: pytest.CaptureFixture[str]) -> None:
    write(state, 1, 0, "agent", "older\n", group=1)
    write(state, 5, 0, "agent", "other\n", group=1)
    local.print_logs(state, request(component=LogComponent.AGENT))
    assert capsys.readouterr().out == "[group 0 0 agent] one\n[group 0 0 agent] two\n[group 1 0 agent] other\n"


def test_one_file_has_no_labels(state: DeploymentState, capsys: pytest.CaptureFixture[str]) -> None:
    local.print_logs(state, request(rank=0, component=LogComponent.AGENT, tail=1, colour=True))
    local.print_logs(state, request(rank=0, component=LogComponent.VLLM, tail=1))
    assert capsys.readouterr().out == "two\nready\n"


@pytest.mark.parametrize("form", list(DocumentFormat))
def test_documents(state: DeploymentState, capsys: pytest.CaptureFixture[str], form: DocumentFormat) -> None:
    local.print_logs(state, request(rank=1, form=form))
    line = capsys.readouterr().out.removeprefix("- ")
    assert json.loads(line) == {"rank": 1, "component": "ray", "line": "joined"}


def test_the_loop(state: DeploymentState, capsys: pytest.CaptureFixture[str]) -> None:
    state.log.write_text("formed\n")
    local.print_logs(state, request(component=LogComponent.LOOP))
    assert capsys.readouterr().out == "formed\n"


def test_nothing_there(state: DeploymentState, saved: Callable[..., DeploymentState]) -> None:
    with pytest.raises(CommandError, match=r"no logs of rank 7; its ranks are 0, 1"):
        local.print_logs(state, request(rank=7))
    # Rank 1 exists and has not started its engine.
    with raises_naming(CommandError, "rank 1", "'nano'", "no log", "vllm"):
        local.print_logs(state, request(rank=1, component=LogComponent.VLLM))
    other = saved(name="other")
    other.evidence().mkdir()
    with pytest.raises(CommandError, match="not running, and its members' logs went with them; remaining files"):
        local.print_logs(other, request())


def test_following_into_the_next_incarnation(
    state: DeploymentState, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = True
    monkeypatch.setattr(DeploymentState, "holder", lambda _: 1 if running else None)
    steps = iter(range(9))

    def wait(_: float) -> None:
        nonlocal running
        match next(steps):
            case 0:
                write(state, 2, 0, "agent", "thr")
            case 1:
                write(state, 2, 0, "agent", "ee\n")
            case 2:
                write(state, 3, 0, "agent", "a\nb\n")
            case 3:
                write(state, 3, 0, "agent", "last word")
                running = False

    local.print_logs(state, request(component=LogComponent.AGENT, follow=True, tail=1), wait=wait)
    assert capsys.readouterr().out.splitlines() == [
        "[0 agent] two",
        "[0 agent] three",
        "[0 agent] a",
        "[0 agent] b",
        "[0 agent] last word",
    ]


def test_following_a_log_that_is_moved_and_one_that_is_cut(
    state: DeploymentState, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = True
    monkeypatch.setattr(DeploymentState, "holder", lambda _: 1 if running else None)
    state.log.write_text("first\n")
    steps = iter(range(9))

    def wait(_: float) -> None:
        nonlocal running
        match next(steps):
            case 0:
                with state.log.open("a") as file:
                    file.write("last of the old\n")
                state.log.rename(state.log.with_name("loop.log.1"))
                state.log.write_text("new\n")
            case 1:
                state.log.write_text("cut\n"[:0])
            case 2:
                state.log.write_text("a\n")
            case 3:
                running = False

    local.print_logs(state, request(component=LogComponent.LOOP, follow=True), wait=wait)
    assert capsys.readouterr().out.splitlines() == ["first", "last of the old", "new", "a"]


def test_lines_name_their_group_although_the_others_have_no_files_here(
    state: DeploymentState, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are on other machines, or were given up."""
    deployment = state.manifest()
    assert deployment is not None
    several = deployment.spec.model_copy(update={"replicas": 2})
    state.save_manifest(deployment.model_copy(update={"spec": several}))
    local.print_logs(state, request(component=LogComponent.RAY))
    assert capsys.readouterr().out == "[group 0 1 ray] joined\n"
    state.forget_incarnations()
    write(state, 1, 0, "vllm", "ready\n", group=1)
    local.print_logs(state, request())
    assert capsys.readouterr().out == "[group 1 0 vllm] ready\n"
