"""`dsv4 connect`: real clients use the printed and written settings with a running gateway that requires a key."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dsv4_operator.api import DeploymentStatus, load
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli.chat import write_environment, write_settings
from dsv4_operator.cli.main import run
from dsv4_operator.cli.output import CommandError

MANIFEST = """
apiVersion: dsv4.dev/v1alpha1
kind: DSV4Deployment
metadata: {name: nano}
spec:
  model: {variant: Nano, source: {nano: {seed: 0}}}
  topology: {hardware: CPU, nodesPerGroup: 2}
  gateway: {apiKeys: {secretKeyRef: {name: nano-api, key: keys}}}
"""
OPENAI = """
import os, openai
client = openai.OpenAI(max_retries=0, timeout=120)
chunks = client.chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": "Once"}], max_tokens=5, stream=True)
print([choice.finish_reason for chunk in chunks for choice in chunk.choices][-1])
"""


@pytest.fixture
def root():
    # A short path: the state directory contains Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def serving(tmp_path, root, monkeypatch):
    """Return a function that makes the arguments for a deployment that serves at a URL; hold the deployment's lock."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CLAUDE_CONFIG_DIR", raising=False)
    state = DeploymentState(root, "nano")
    state.prepare()
    secret = state.secrets / "nano-api/keys"
    secret.parent.mkdir(parents=True)
    secret.write_text("first\n")
    secret.chmod(0o600)

    def serve(url):
        found = load(MANIFEST)
        state.save_manifest(found)
        status = DeploymentStatus(endpoint=f"{url}/v1", ready_replicas=1, replicas=1)
        state.save_object(found.model_copy(update={"status": status}))
        return ["connect", "nano", "--state-dir", str(state.root)]

    with state.lock(owner=os.getpid()):
        yield serve


async def command(words):
    assert await asyncio.to_thread(run, words) == 0


async def executed(code, environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "ANTHROPIC"))}
    call = [sys.executable, "-c", code]
    done = await asyncio.to_thread(
        subprocess.run, call, env=clean | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_openais_client_works_with_the_printed_settings(kit, serving, capsys):
    async with kit.Lab(keys="first\n") as lab:
        await command([*serving(lab.url), "--client", "openai"])
        lines = [shlex.split(line)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("export ")]
        variables = dict(line.split("=", 1) for line in lines)
        assert await executed(OPENAI, variables) == "length"


async def test_the_file_has_the_settings_without_a_running_loop(serving, root, tmp_path, capsys):
    serving("http://127.0.0.1:9")
    file = tmp_path / "nano.yaml"
    file.write_text(MANIFEST.replace("keys}}}", "keys}}, listen: 192.0.2.7}"))
    await command(["connect", str(file), "--state-dir", str(root), "--client", "openai"])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "export OPENAI_BASE_URL=http://192.0.2.7:8000/v1",
        "export OPENAI_API_KEY=first",
        "export OPENAI_MODEL=nano",
    ]


async def test_openais_client_works_with_the_written_file(kit, serving, tmp_path):
    async with kit.Lab(keys="first\n") as lab:
        await command([*serving(lab.url), "--write"])
        assert (tmp_path / "dsv4.env").stat().st_mode & 0o777 == 0o600
        lines = (tmp_path / "dsv4.env").read_text().splitlines()
        variables = dict(line.split("=", 1) for line in lines)
        assert await executed(OPENAI, variables) == "length"
        assert variables["OPENAI_API_BASE_URL"] == f"{lab.url}/v1", "Open WebUI"
        settings = json.loads((tmp_path / ".claude/settings.json").read_text())
        assert settings == {
            "env": {
                "ANTHROPIC_BASE_URL": lab.url,
                "ANTHROPIC_AUTH_TOKEN": "first",
                "ANTHROPIC_MODEL": "nano",
                "ANTHROPIC_SMALL_FAST_MODEL": "nano",
            }
        }
        # Claude Code sends the token as a bearer token to BASE/v1/messages.
        code = (
            "import anthropic, os\n"
            "client = anthropic.Anthropic(max_retries=0, timeout=120)\n"
            "print([model.id for model in client.models.list()])"
        )
        claude = {name: settings["env"][name] for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN")}
        assert await executed(code, claude) == "['nano']"
        # A second run changes nothing and makes no backup.
        before = sorted(tmp_path.rglob("*"))
        await command([*serving(lab.url), "--write"])
        assert sorted(tmp_path.rglob("*")) == before


def test_other_settings_stay_and_the_earlier_file_too(tmp_path):
    file = tmp_path / "settings.json"
    before = json.dumps({"theme": "dark", "env": {"A": "1", "ANTHROPIC_MODEL": "old"}})
    file.write_text(before)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    write_settings(link, {"ANTHROPIC_MODEL": "new"})
    assert json.loads(file.read_text()) == {"theme": "dark", "env": {"A": "1", "ANTHROPIC_MODEL": "new"}}
    assert link.is_symlink()
    (backup,) = tmp_path.glob("*.bak")
    assert backup.read_text() == before
    write_settings(link, {"ANTHROPIC_MODEL": "new"})
    assert len(list(tmp_path.glob("*.bak"))) == 1


@pytest.mark.parametrize("text", ["{", "[]", '"x"', '{"env": 3}', '{"env": ["A"]}'])
def test_a_file_without_settings_is_not_changed(text, tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(text)
    with pytest.raises(CommandError, match=r"settings\.json .*; correct it, or move it away"):
        write_settings(file, {"A": "1"})
    assert file.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


def test_other_variables_stay(tmp_path):
    file = tmp_path / "dsv4.env"
    file.write_text("# mine\nX=1\nOPENAI_API_KEY=old\n")
    write_environment(file, {"OPENAI_API_KEY": "new"})
    assert file.read_text() == "# mine\nX=1\nOPENAI_API_KEY=new\n"


def test_a_stopped_deployment(serving, tmp_path, capsys):
    words = serving("http://127.0.0.1:9")
    assert run([*words, "--client", "other"]) == 2
    assert "--client 'other' is unknown; use one of all, claude, openai, webui" in capsys.readouterr().err
