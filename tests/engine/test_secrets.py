"""Marked secrets are used in a whole life of a deployment with a real engine, and every output is searched for them."""

from __future__ import annotations

import stat
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from dsv4_testkit.harness import MARKER, Deployment

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

KEY, TOKEN, STORE = "canary-of-callers-7f3a", "hf_canaryOfTheHub7f3acanaryOfTheHub7f3a", "canary-of-the-store-7f3a"
CANARIES = [word.encode() for word in (KEY, TOKEN, STORE)]


@pytest.fixture(scope="module")
def deployment(weights: Path) -> Iterator[Deployment]:
    """Start one member whose API requires keys, by a user with tokens in the environment."""
    environment = {"HF_TOKEN": TOKEN, "AWS_SECRET_ACCESS_KEY": STORE}
    found = Deployment(nodes=1, environment=environment, weights=weights)
    manifest = yaml.safe_load(found.file.read_text())
    manifest["spec"]["gateway"] = {"apiKeys": {"secretKeyRef": {"name": "callers", "key": "keys"}}}
    found.file.write_text(yaml.safe_dump(manifest))
    keys = found.root / "secrets" / "callers" / "keys"
    keys.parent.mkdir(parents=True)
    keys.touch(mode=0o600)
    keys.write_text(f"# whose\n{KEY}\n")
    found.up()
    yield found
    found.destroy()


def ask(deployment: Deployment, key: str | None) -> int:
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


def processes(deployment: Deployment) -> Iterator[psutil.Process]:
    """Yield all processes of the deployment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == str(deployment.directory):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def files(deployment: Deployment) -> Iterator[Path]:
    """Yield every file of the deployment, including those of its engine and of Ray."""
    for path in deployment.directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path


def with_canaries(text: bytes) -> list[bytes]:
    return [word for word in CANARIES if word in text]


def test_a_life_with_secrets_leaves_none_anywhere(deployment: Deployment, tmp_path: Path) -> None:
    assert (ask(deployment, None), ask(deployment, "wrong"), ask(deployment, KEY)) == (401, 401, 200)

    # The engine's own processes do not have them; only the processes that fetch weights and check keys do.
    engine = psutil.Process(deployment.pid(0, "engine-core"))
    assert with_canaries(Path(f"/proc/{engine.pid}/environ").read_bytes()) == []
    commands = [" ".join(process.cmdline()) for process in processes(deployment)]
    assert len(commands) > 5
    assert with_canaries("\n".join(commands).encode()) == []

    # A death creates evidence, and a request during it creates an entry in the gateway's log.
    struck = time.time()
    engine.kill()
    assert ask(deployment, KEY) == 200
    deployment.wait("Serving", since=struck)

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

    found = list(files(deployment))
    assert any(path.name == "gateway.log" for path in found)
    assert [path for path in found if with_canaries(path.read_bytes())] == []
    # Other users can neither enter the directory nor read the loop's own files.
    assert stat.S_IMODE(deployment.directory.stat().st_mode) == 0o700
    own = [path for path in deployment.directory.iterdir() if path.is_file()]
    assert [path for path in own if path.stat().st_mode & 0o077] == []
