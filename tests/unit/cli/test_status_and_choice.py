from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4_operator.cli import diagnostics
from dsv4_operator.cli.output import CommandError, TableFormat
from dsv4_operator.cli.sources.local import LocalSource, read_deployment, select_state
from dsv4_testkit.errors import raises_naming


def test_choosing(root: Path, saved: Callable[..., Any], held: Callable[..., int]) -> None:
    with pytest.raises(CommandError, match="there is no deployment under"):
        select_state(root, None)
    first = saved()
    assert select_state(root, None) == first
    second = saved(name="other")
    with raises_naming(CommandError, "Give its name", "nano, other"):
        select_state(root, None)
    held(second)
    assert select_state(root, None) == second, "the only one that runs"
    assert select_state(root, "nano") == first
    with pytest.raises(CommandError, match="no deployment 'x' under"):
        select_state(root, "x")


def test_a_deployment_on_other_machines_is_named_with_the_way_to_it(root: Path, saved: Callable[..., Any]) -> None:
    (root / "remote").mkdir()
    (root / "remote" / "flash.json").touch()
    for name in (None, "flash"):
        with raises_naming(CommandError, f"under {root}", "flash runs on other machines", "--url"):
            select_state(root, name)
    saved()
    with raises_naming(CommandError, "no deployment 'x' under", "there is nano"):
        select_state(root, "x")


def test_a_running_deployment_as_json(
    root: Path, saved: Callable[..., Any], held: Callable[..., int], make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    held(saved(make.status()))
    diagnostics.show(LocalSource(root), None, TableFormat.JSON, watch=False)
    document = json.loads(capsys.readouterr().out)
    assert (document["apiVersion"], document["kind"]) == ("dsv4.dev/v1beta1", "DSV4Deployment")
    assert document["metadata"]["name"] == "nano"
    assert document["spec"]["topology"]["nodesPerGroup"] == 2
    assert document["status"]["phase"] == "Serving"
    assert document["status"]["endpoint"] == "http://127.0.0.1:8000/v1"
    assert document["status"]["conditions"][0]["status"] == "True"
    assert document["status"]["groups"][0]["members"][0]["processes"] == [
        {"name": "agent", "pid": 11},
        {"name": "api", "pid": 12},
    ]


def test_the_status_without_a_loop_is_stopped(root: Path, saved: Callable[..., Any], make: Any) -> None:
    group = make.failed_group(make.failure())
    item = read_deployment(saved(make.status(group)))
    found = item.document()["status"]
    assert found["phase"] == "Stopped"
    assert "endpoint" not in found
    assert found["readyReplicas"] == 0
    assert found["conditions"][0]["status"] == "False"
    assert found["conditions"][0]["reason"] == "GroupStopped"
    assert found["groups"][0]["members"] == []
    assert found["groups"][0]["lastFailure"]["cause"] == "EngineCoreDied", "for `dsv4 why`"


def test_several(root: Path, saved: Callable[..., Any], make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    saved(make.status())
    saved(name="other")
    diagnostics.show(LocalSource(root), None, TableFormat.TABLE, watch=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["nano", "0/1", "Stopped"], ["other", "0/1", "Stopped"]]
    diagnostics.show(LocalSource(root), None, TableFormat.YAML, watch=False)
    document = yaml.safe_load(capsys.readouterr().out)
    assert document["kind"] == "List"
    assert [item["metadata"]["name"] for item in document["items"]] == ["nano", "other"]


def test_none(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diagnostics.show(LocalSource(root), None, TableFormat.TABLE, watch=False)
    assert capsys.readouterr() == ("", f"no deployments under {root}\n")
    diagnostics.show(LocalSource(root), None, TableFormat.JSON, watch=False)
    assert json.loads(capsys.readouterr().out)["items"] == []


def test_watching_a_pipe_prints_changes_only(
    root: Path, saved: Callable[..., Any], held: Callable[..., int], make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    state = saved(make.status(ready=False))
    held(state)
    steps = iter(range(4))

    def wait(_: float) -> None:
        match next(steps):
            case 1:
                state.save_object(make.deployment(make.status()))
            case 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        diagnostics.show(LocalSource(root), "nano", TableFormat.TABLE, watch=True, wait=wait)
    rows = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("nano")]
    assert rows == ["Starting", "Serving"]


@pytest.mark.parametrize("text", ["{}", "[" * 5000, "\udcff"])
def test_one_deployment_that_cannot_be_read_does_not_hide_the_others(
    root: Path, saved: Callable[..., Any], capsys: pytest.CaptureFixture[str], text: str
) -> None:
    saved()
    (root / "old").mkdir()
    (root / "old" / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    for _ in range(2):
        diagnostics.show(LocalSource(root), None, TableFormat.TABLE, watch=False)
        shown = capsys.readouterr()
        assert "nano" in shown.out
        assert shown.err.count("warning: the files of 'old' in") == 1
    (root / "old" / "manifest.json").unlink()
    (root / "old" / "manifest.json").mkdir()
    diagnostics.show(LocalSource(root), None, TableFormat.TABLE, watch=False)
    assert "warning: the files of 'old' in" in capsys.readouterr().err


def test_unreadable_files_are_named(root: Path, saved: Callable[..., Any]) -> None:
    state = saved()
    (state.directory / "object.json").write_text("{}")
    with pytest.raises(CommandError, match="`dsv4 down nano --purge` removes them"):
        read_deployment(state)
