"""Object stores and directories, each with its real client, and with a real server where one exists."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from aiohttp import web
from moto.server import ThreadedMotoServer

from dsv4_runtime.contract import Cause, WeightsPlan, WeightsSource
from dsv4_runtime.weights import staging, transfer
from dsv4_runtime.weights.checkpoint import MAKE_SUMS, ManifestFile, TransientError, WeightsError
from dsv4_runtime.weights.members import StagingJob
from dsv4_runtime.weights.origins import S3, SharedPath
from dsv4_runtime.weights.transfer import HttpClient
from dsv4_testkit.errors import raises_naming
from dsv4_testkit.weights_servers import Server, same_files

Serve = Callable[[web.Application], Server]
SHARD = "model-00002-of-00003.safetensors"


def stage(plan: WeightsPlan) -> int:
    return staging.stage(StagingJob(weights=plan), lambda _: None).fetched


# S3: boto3 against moto's server.


@pytest.fixture
def store(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, object]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
    client.create_bucket(Bucket="models")
    for path in checkpoint.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), "models", f"v4/nano/{path.relative_to(checkpoint).as_posix()}")
    yield url, client
    client.close()
    server.stop()


def s3_plan(endpoint: str, target: Path, origin: str = "s3://models/v4/nano") -> WeightsPlan:
    return WeightsPlan(source=WeightsSource.S3, path=str(target), origin=origin, endpoint=endpoint)


@pytest.mark.filterwarnings("default")  # warnings of moto and botocore
@pytest.mark.parametrize("sums", [True, False])
def test_a_store(store: tuple[str, object], checkpoint: Path, tmp_path: Path, sums: bool) -> None:
    url, client = store
    if not sums:
        client.delete_object(Bucket="models", Key="v4/nano/SHA256SUMS")  # type: ignore[attr-defined]
    plan = s3_plan(url, tmp_path / "weights")
    assert stage(plan) > 9_900_000
    assert same_files(checkpoint, tmp_path / "weights")
    assert stage(plan) == 0


@pytest.mark.filterwarnings("default")
def test_errors_of_a_store_are_named(
    store: tuple[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, client = store
    with raises_naming(WeightsError, "NoSuchBucket", "bucket's name"):
        stage(s3_plan(url, tmp_path / "weights", "s3://nothing/here"))
    with pytest.raises(WeightsError, match=r"s3://models/v4 has no config\.json"):
        stage(s3_plan(url, tmp_path / "weights", "s3://models/v4"))
    client.delete_object(Bucket="models", Key=f"v4/nano/{SHARD}")  # type: ignore[attr-defined]
    with pytest.raises(WeightsError, match=f"lacks {SHARD}, which its SHA256SUMS lists"):
        stage(s3_plan(url, tmp_path / "weights"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "")
    (tmp_path / "credentials").write_text("[default]\n")
    with pytest.raises(WeightsError, match=r"has no \[default\] with aws_access_key_id"):
        stage(s3_plan(url, tmp_path / "weights").model_copy(update={"credentials_file": str(tmp_path / "credentials")}))


@pytest.mark.filterwarnings("default")
def test_a_file_that_is_replaced_in_a_store_is_never_mixed(store: tuple[str, object], tmp_path: Path) -> None:
    url, client = store
    client.delete_object(Bucket="models", Key="v4/nano/SHA256SUMS")  # type: ignore[attr-defined]
    origin = S3(s3_plan(url, tmp_path / "weights"))
    file = next(file for file in origin.manifest().files if file.name == SHARD)
    with origin.open(file, 0):
        pass
    client.put_object(Bucket="models", Key=f"v4/nano/{SHARD}", Body=bytes(file.size))  # type: ignore[attr-defined]
    for start in (0, 1 << 20):
        with pytest.raises(WeightsError, match=r"412.*replaced while it was fetched"), origin.open(file, start):
            pass


def test_a_signature_is_not_repeated() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v4/x?X-Amz-Signature=secret"
        web = HttpClient(direct=True)
        for ask in (lambda: web.get(url, {}), lambda: web.size(url, {}), lambda: web.range(url, {}, 0).__enter__()):
            with pytest.raises(TransientError, match="Connection refused") as refused:
                ask()
            assert "secret" not in str(refused.value)


# A shared directory.


@pytest.mark.parametrize("sums", [True, False])
def test_a_shared_directory(checkpoint: Path, tmp_path: Path, sums: bool) -> None:
    if not sums:
        (checkpoint / "SHA256SUMS").unlink()
    plan = WeightsPlan(source=WeightsSource.SHARED_PATH, path=str(tmp_path / "weights"), origin=str(checkpoint))
    assert stage(plan) > 9_900_000
    assert same_files(checkpoint, tmp_path / "weights")
    assert stage(plan) == 0


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("command", [MAKE_SUMS, "sha256sum * > SHA256SUMS", "sha256sum ./* > SHA256SUMS"])
@pytest.mark.parametrize("source", [WeightsSource.SHARED_PATH, WeightsSource.HTTP])
def test_a_list_of_sums_that_is_made_again(
    checkpoint: Path, tmp_path: Path, serve: Serve, source: WeightsSource, command: str, turns: int
) -> None:
    """In the second run, the shell's pattern also matches the list itself."""
    (checkpoint / "SHA256SUMS").unlink()
    for _ in range(turns):
        # `sha256sum` fails for the directory, and lists all files.
        subprocess.run(command, shell=True, cwd=checkpoint, check=False, stderr=subprocess.DEVNULL, timeout=120)
    app = web.Application()
    app.router.add_static("/", checkpoint)
    origin = str(checkpoint) if source is WeightsSource.SHARED_PATH else serve(app).url
    assert stage(WeightsPlan(source=source, path=str(tmp_path / "weights"), origin=origin)) > 9_900_000
    assert not (tmp_path / "weights" / "SHA256SUMS").exists()


@pytest.mark.parametrize("when", ["before", "while", "between transfers"])
def test_a_file_that_is_replaced_in_a_shared_directory_is_never_mixed(
    checkpoint: Path, tmp_path: Path, when: str
) -> None:
    (checkpoint / "SHA256SUMS").unlink()
    origin = SharedPath(
        WeightsPlan(source=WeightsSource.SHARED_PATH, path=str(tmp_path / "weights"), origin=str(checkpoint))
    )
    file = next(file for file in origin.manifest().files if file.name == SHARD)
    data, room = bytes(file.size), memoryview(bytearray(1 << 20))

    def transfer(start: int) -> None:
        with origin.open(file, start) as stream:
            assert stream.readinto(room)
            if when == "while":
                (checkpoint / SHARD).write_bytes(data)

    if when == "between transfers":
        transfer(0)
    if when != "while":
        (checkpoint / SHARD).write_bytes(data)
    with pytest.raises(WeightsError, match=f"{SHARD} was changed while it was copied"):
        transfer(1 << 20)


@pytest.mark.parametrize(
    "given", ["bytes 5-7/100", "bytes 100-2/100", "", "items 7-9/100", "bytes */100", "bytes 70-99/100"]
)
def test_a_server_that_sends_another_range(serve: Serve, given: str) -> None:
    async def part(_: web.Request) -> web.Response:
        return web.Response(status=206, body=b"abc", headers={"Content-Range": given} if given else {})

    app = web.Application()
    app.router.add_get("/{path:.+}", part)
    url = serve(app).url
    member = transfer.Members({3: url}, "token", "any").sources[3]
    places = (HttpClient(direct=True).range(f"{url}/x", {}, 7), member.open(ManifestFile(name="x", size=100), 7))
    for place in places:
        with pytest.raises(WeightsError, match="for bytes=7-"), place:
            pass


def test_credentials_come_from_the_plan_alone(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the request nor a redirected one uses an entry of `.netrc`."""
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\ndefault login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    shown: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        shown.append(request.headers.get("Authorization"))
        if request.path == "/away":
            raise web.HTTPFound(f"http://localhost:{request.url.port}/there")
        return web.Response(body=b"x")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    url, client = serve(app).url, HttpClient()
    for headers in ({}, {"Authorization": "Bearer mine"}):
        client.get(f"{url}/here?X-Amz-Signature=x", headers)
        client.get(f"{url}/away", headers)
    assert shown == [None, None, None, "Bearer mine", "Bearer mine", None]


def test_a_damaged_shared_directory(checkpoint: Path, tmp_path: Path) -> None:
    plan = WeightsPlan(source=WeightsSource.SHARED_PATH, path=str(tmp_path / "weights"), origin=str(checkpoint))
    data = bytearray((checkpoint / SHARD).read_bytes())
    data[-1] ^= 1
    (checkpoint / SHARD).write_bytes(data)
    with pytest.raises(WeightsError, match=f"{SHARD} from .* instead of") as caught:
        stage(plan)
    assert caught.value.cause is Cause.WEIGHTS_CORRUPT
    (checkpoint / SHARD).unlink()
    with pytest.raises(WeightsError, match=f"lacks {SHARD}"):
        stage(plan)


@pytest.mark.parametrize("name", [SHARD, "config.json", "notes.txt"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_shared_directory_with_special_files_is_refused(
    checkpoint: Path, tmp_path: Path, kind: str, name: str
) -> None:
    """A link could point to any file of the node; reading a FIFO would block forever."""
    (checkpoint / "SHA256SUMS").unlink()
    (checkpoint / name).unlink(missing_ok=True)
    put(checkpoint / name, kind)
    plan = WeightsPlan(source=WeightsSource.SHARED_PATH, path=str(tmp_path / "weights"), origin=str(checkpoint))
    with raises_naming(WeightsError, name, "put the file itself there"):
        stage(plan)


def put(path: Path, kind: str) -> None:
    if kind == "link":
        path.symlink_to("/etc/passwd")
    else:
        os.mkfifo(path)


# A directory that is used in place.


def path_plan(folder: Path) -> WeightsPlan:
    return WeightsPlan(source=WeightsSource.PATH, path=str(folder))


def test_a_path_is_used_where_it_is(checkpoint: Path) -> None:
    before = sorted(checkpoint.rglob("*"))
    assert stage(path_plan(checkpoint)) == 0
    assert sorted(checkpoint.rglob("*")) == before


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("short", f"{SHARD} has 1000 bytes instead of"),
        ("gone", f"{SHARD} is missing, although the index lists it"),
        ("noise", f"{SHARD} is not a safetensors file"),
    ],
)
def test_a_path_with_a_bad_shard(checkpoint: Path, damage: str, text: str) -> None:
    shard = checkpoint / SHARD
    if damage == "short":
        with shard.open("r+b") as stream:
            stream.truncate(1000)
    elif damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(b"\xff" * 5000)
    with pytest.raises(WeightsError, match=text) as caught:
        stage(path_plan(checkpoint))
    assert caught.value.cause is Cause.WEIGHTS_CORRUPT


def test_a_path_with_a_fifo_for_a_shard(checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()
    os.mkfifo(checkpoint / SHARD)
    with raises_naming(WeightsError, SHARD, "no regular file"):
        stage(path_plan(checkpoint))


def test_a_path_whose_files_are_links_as_in_a_hubs_cache(checkpoint: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for file in checkpoint.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert stage(path_plan(snapshot)) == 0


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b", ".hidden", "a\\b", ""])
def test_an_index_that_names_shards_elsewhere(checkpoint: Path, name: str) -> None:
    index = checkpoint / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    told["weight_map"]["evil"] = name
    index.write_text(json.dumps(told))
    (checkpoint.parent / "outside.safetensors").write_bytes((checkpoint / SHARD).read_bytes())
    with pytest.raises(WeightsError, match=r"index\.json is not an index of safetensors: ") as caught:
        stage(path_plan(checkpoint))
    assert caught.value.cause is Cause.WEIGHTS_CORRUPT


def test_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json; put a whole checkpoint there") as caught:
        stage(path_plan(tmp_path))
    assert caught.value.cause is Cause.STAGING_FAILED
