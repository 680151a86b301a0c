"""Finding the API server as kubectl does, and showing who asks."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4_operator.kube import AccessError, access, find_access

PEM = "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n"


def kubeconfig(file: Path, user: dict[str, Any], **cluster: Any) -> Path:
    file.write_text(
        yaml.safe_dump(
            {
                "contexts": [
                    {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "models"}},
                    {"name": "two", "context": {"cluster": "gone", "user": "u"}},
                ],
                "clusters": [{"name": "c", "cluster": {"server": "https://example.invalid:6443/", **cluster}}],
                "users": [{"name": "u", "user": user}],
                "current-context": "one",
            }
        )
    )
    return file


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kubeconfig and no pod but those of the test."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_kubeconfig_says_where_and_as_whom(tmp_path: Path) -> None:
    data = base64.b64encode(PEM.encode()).decode()
    found = find_access(kubeconfig=kubeconfig(tmp_path / "c", {"token": "t"}, **{"certificate-authority-data": data}))
    assert (found.server, found.namespace) == ("https://example.invalid:6443", "models")
    assert found.authority == PEM
    assert found.credentials().token == "t"
    assert not found.changing


def test_files_are_relative_to_their_kubeconfig(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("ca.pem", "me.pem", "me.key"):
        (home / name).write_text(f"{name} {PEM}")
    user = {"client-certificate": "me.pem", "client-key": "me.key"}
    found = find_access(kubeconfig=kubeconfig(home / "c", user, **{"certificate-authority": "ca.pem"}))
    assert found.authority == f"ca.pem {PEM}"
    assert found.credentials().certificate == f"me.pem {PEM}"
    assert found.credentials().key == f"me.key {PEM}"
    assert "me.key" not in repr(found)


def test_the_first_file_of_several_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kubeconfig(tmp_path / "a", {"token": "first"})
    second = kubeconfig(tmp_path / "b", {"token": "second"})
    names = [str(tmp_path / "missing"), str(first), str(second)]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(names))
    assert find_access().credentials().token == "first"


def test_a_pod_has_an_account_of_its_own_whose_token_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path)
    for name, text in (("token", "early\n"), ("ca.crt", PEM), ("namespace", "dsv4\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    found = find_access()
    assert (found.server, found.namespace, found.changing) == ("https://[fd00::1]:443", "dsv4", True)
    assert found.credentials().token == "early"
    (tmp_path / "token").write_text("late")
    assert found.credentials().token == "late"
    (tmp_path / "token").unlink()
    with pytest.raises(AccessError, match="should hold the account's token"):
        found.credentials()


def test_a_plugin_is_asked_for_the_credential(tmp_path: Path) -> None:
    program = (
        "import json, os; request = json.loads(os.environ['KUBERNETES_EXEC_INFO']); "
        "print(json.dumps({'status': {'token': os.environ['GREETING'] + request['spec']['cluster']['server']}}))"
    )
    plugin = {"command": sys.executable, "args": ["-c", program], "env": [{"name": "GREETING", "value": "for "}]}
    found = find_access(kubeconfig=kubeconfig(tmp_path / "c", {"exec": plugin}))
    assert found.changing
    assert found.credentials().token == "for https://example.invalid:6443"


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("import sys; sys.exit('log in first')", "failed: log in first"),
        ("print('{}')", "printed no ExecCredential"),
        (None, "cannot be run"),
    ],
)
def test_a_plugin_that_gives_none_is_named(tmp_path: Path, program: str | None, sentence: str) -> None:
    plugin = {"command": sys.executable, "args": ["-c", program]} if program else {"command": "no-such-program"}
    found = find_access(kubeconfig=kubeconfig(tmp_path / "c", {"exec": plugin}))
    with pytest.raises(AccessError, match=sentence):
        found.credentials()


def test_what_is_missing_is_named_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="no cluster to speak to"):
        find_access()
    file = kubeconfig(tmp_path / "c", {})
    with pytest.raises(AccessError, match="no context 'three'; there is: one, two"):
        find_access("three", file)
    with pytest.raises(AccessError, match="the cluster 'gone' of context 'two' is missing"):
        find_access("two", file)
    file.write_text("{")
    with pytest.raises(AccessError, match="cannot be read as a kubeconfig"):
        find_access(kubeconfig=file)
    file.write_text("{}")
    with pytest.raises(AccessError, match="no context is chosen"):
        find_access(kubeconfig=file)
