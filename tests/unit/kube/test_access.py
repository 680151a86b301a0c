"""API server and credentials by the rules of kubectl: kubeconfigs, plugins, proxies and the account of a pod."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kopf
import psutil
import pytest
import yaml
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4_operator.controller import watching
from dsv4_operator.kube import PODS, AccessError, Client, KubeError, access, client, find_access
from dsv4_operator.kube.kubeconfig import KubeconfigError, load
from dsv4_testkit.certificates import HOST, certificate
from dsv4_testkit.errors import raises_naming

PEM = "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n"


def kubeconfig(file: Path, user: dict[str, Any], **cluster: Any) -> Path:
    file.write_text(
        yaml.safe_dump(
            {
                "contexts": [
                    {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "models"}},
                    {"name": "two", "context": {"cluster": "gone", "user": "u"}},
                ],
                "clusters": [{"name": "c", "cluster": {"server": "https://example.invalid:6443", **cluster}}],
                "users": [{"name": "u", "user": user}],
                "current-context": "one",
            }
        )
    )
    return file


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove every kubeconfig and pod account except those of the test."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_kubeconfig_provides_server_and_credentials(tmp_path: Path) -> None:
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


PLUGIN = """
import json, os, sys, time
with open(sys.argv[1], "a") as calls:
    calls.write("x")
request = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
said = json.load(open(sys.argv[1] + ".answer"))
if "fail" in said:
    sys.exit(said["fail"])
time.sleep(said.pop("sleep", 0))
if "token" in said:
    said["token"] += os.environ["GREETING"] + request["spec"]["cluster"]["server"].rpartition("/")[2]
answer = {"apiVersion": request["apiVersion"], "kind": request["kind"]}
print(said.pop("print", None) or json.dumps({**answer, "status": said}))
"""


class Plugin:
    """A real credential plugin whose output the test sets."""

    def __init__(self, folder: Path) -> None:
        self._calls = folder / "calls"
        script = folder / "plugin.py"
        script.write_text(PLUGIN)
        self.user = {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1",
                "command": sys.executable,
                "args": [str(script), str(self._calls)],
                "env": [{"name": "GREETING", "value": "-for-"}],
                "provideClusterInfo": True,
            }
        }

    def answers(self, **status: Any) -> None:
        self._calls.with_name("calls.answer").write_text(json.dumps(status))

    @property
    def calls(self) -> int:
        return len(self._calls.read_text())


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


def stamp(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_a_plugin_gives_the_credential(tmp_path: Path, plugin: Plugin) -> None:
    plugin.answers(token="early", expirationTimestamp="2030-01-01T00:00:00Z")
    found = find_access(kubeconfig=kubeconfig(tmp_path / "c", plugin.user))
    assert found.changing
    assert found.credential.expires == datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    plugin.answers(token="late")
    later = found.credentials()
    assert (later.token, later.scheme, later.expires) == ("late-for-example.invalid:6443", "Bearer", None)
    plugin.answers(clientCertificateData=PEM, clientKeyData="the key")
    later = found.credentials()
    assert (later.token, later.certificate, later.key) == (None, PEM, "the key")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({"fail": "log in first"}, "gave no credential: .*log in first"),
        ({"print": "{}"}, "gave no credential: .*missing key 'apiVersion'"),
        ({"print": "not JSON"}, "gave no credential: .*failed to decode process output"),
        ({"other": 1}, "gave no credential: .*missing token"),
        ({"token": "two lines\n"}, "characters that no HTTP header may have"),
        (None, "'no-such-program' gave no credential: .*No such file"),
    ],
)
def test_a_plugin_without_a_credential_is_named(
    tmp_path: Path, plugin: Plugin, answer: dict[str, Any] | None, sentence: str
) -> None:
    plugin.answers(**(answer or {}))
    if answer is None:
        plugin.user["exec"]["command"] = "no-such-program"
    with pytest.raises(AccessError, match=sentence):
        find_access(kubeconfig=kubeconfig(tmp_path / "c", plugin.user))


def test_a_plugin_that_hangs_ends_with_its_time_limit(
    tmp_path: Path, plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_READ_SECONDS", 6.0)
    plugin.answers(sleep=600)
    with pytest.raises(AccessError, match="no credential within 6 s"):
        find_access(kubeconfig=kubeconfig(tmp_path / "c", plugin.user))
    assert plugin.calls == 1
    left = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert not [words for words in left if str(tmp_path) in " ".join(words or ())]


@contextlib.asynccontextmanager
async def api_server(tokens: set[str], tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve an empty list to the bearers of `tokens`; yield host and port, and all credentials received."""
    seen: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        transport = request.transport
        assert transport is not None
        name = "with certificate" if transport.get_extra_info("peercert") else ""
        seen.append(request.headers.get("Authorization", name))
        if not tokens or seen[-1] in tokens:
            return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})
        return web.json_response({"reason": "Unauthorized", "message": "no"}, status=401)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"{host}:{port}", seen
    finally:
        await runner.cleanup()


async def test_a_credential_is_replaced_before_it_expires(
    tmp_path: Path, plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CREDENTIAL_MIN_SECONDS", 0.0)
    async with api_server(set()) as (place, seen):
        plugin.answers(token="a", expirationTimestamp=stamp(time.time() + 3600))
        found = find_access(kubeconfig=kubeconfig(tmp_path / "c", plugin.user, server=f"http://{place}"))
        async with Client(found) as kube:
            await kube.list(PODS)
            await kube.list(PODS)
            assert plugin.calls == 2, "at the start, and at the first request"
            monkeypatch.setattr(client, "_EXPIRY_SECONDS", 7200.0)
            plugin.answers(token="b", expirationTimestamp=stamp(time.time() + 36000))
            await kube.list(PODS)
            await kube.list(PODS)
            assert plugin.calls == 3
        assert seen == [f"Bearer {name}-for-{place}" for name in "aabb"]


async def test_a_credential_that_the_server_rejects_is_replaced(tmp_path: Path, plugin: Plugin) -> None:
    tokens: set[str] = set()
    async with api_server(tokens) as (place, seen):
        plugin.answers(token="a", expirationTimestamp=stamp(time.time() + 3600))
        found = find_access(kubeconfig=kubeconfig(tmp_path / "c", plugin.user, server=f"http://{place}"))
        async with Client(found) as kube:
            await kube.list(PODS)
            tokens.add(f"Bearer b-for-{place}")
            plugin.answers(token="b")
            await kube.list(PODS)
        assert seen == [f"Bearer {name}-for-{place}" for name in "aab"]


@contextlib.asynccontextmanager
async def http_proxy() -> AsyncIterator[tuple[str, list[str]]]:
    """Serve CONNECT; yield the URL, and the first line of each request."""
    requests: list[str] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        requests.append(head.splitlines()[0])
        host, _, port = head.split()[1].rpartition(":")
        other_reader, other_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}", requests


@pytest.mark.parametrize("insecure", [False, True])
async def test_client_certificate_proxy_and_server_name(tmp_path: Path, insecure: bool) -> None:
    pem = certificate(tmp_path, HOST)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, tmp_path / "tls.key")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(pem)
    user = {"client-certificate": pem.name, "client-key": "tls.key"}
    name = {"insecure-skip-tls-verify": True} if insecure else {"certificate-authority": pem.name}
    async with api_server(set(), context) as (place, seen), http_proxy() as (proxy, requests):
        cluster = {"server": f"https://{place}", "proxy-url": proxy, **name}
        if not insecure:
            found = find_access(kubeconfig=kubeconfig(tmp_path / "c", user, **cluster))
            async with Client(found) as kube:
                with pytest.raises(KubeError, match="certificate"):
                    await kube.list(PODS)
            cluster["tls-server-name"] = HOST
        found = find_access(kubeconfig=kubeconfig(tmp_path / "c", user, **cluster))
        async with Client(found) as kube:
            assert await kube.list(PODS) == []
        assert seen == ["with certificate"]
        assert set(requests) == {f"CONNECT {place} HTTP/1.1"}
        # kopf's session uses the same proxy and certificate.
        connection = await login(found)
        assert (connection.proxy_url, connection.as_http_headers()) == (proxy, {})
        async with (
            asyncio.timeout(60),
            web_session(connection) as session,
            session.get(f"https://{place}/", proxy=proxy) as response,
        ):
            assert response.status == 200
        assert seen == ["with certificate"] * 2


async def login(found: access.Access) -> kopf.ConnectionInfo:
    registry = watching._registry(found, lambda _manifest, _gone: None)
    handler = next(iter(registry._activities.get_all_handlers()))
    connection: kopf.ConnectionInfo = await handler.fn()
    return connection


@contextlib.asynccontextmanager
async def web_session(connection: kopf.ConnectionInfo) -> AsyncIterator[Any]:
    import aiohttp

    connector = aiohttp.TCPConnector(ssl=connection.as_ssl_context())
    async with aiohttp.ClientSession(connector=connector, headers=connection.as_http_headers()) as session:
        yield session


async def test_kopf_has_scheme_and_expiry_of_the_credential(tmp_path: Path, plugin: Plugin) -> None:
    plugin.answers(token="t", expirationTimestamp="2030-01-01T00:00:00Z")
    connection = await login(find_access(kubeconfig=kubeconfig(tmp_path / "c", plugin.user)))
    assert connection.expiration == datetime(2030, 1, 1, tzinfo=UTC)
    assert connection.as_http_headers() == {"Authorization": "Bearer t-for-example.invalid:6443"}
    user = {"username": "me", "password": "p"}
    connection = await login(find_access(kubeconfig=kubeconfig(tmp_path / "c", user)))
    assert connection.as_http_headers() == {"Authorization": f"Basic {base64.b64encode(b'me:p').decode()}"}


def json_web_token(expires: float) -> str:
    parts = ({"alg": "none"}, {"exp": int(expires), "sub": "me"})
    return ".".join(
        [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts] + ["x"]
    )


async def test_oidc_refreshes_an_expired_token_and_stores_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OAUTHLIB_INSECURE_TRANSPORT", "1")
    new = json_web_token(time.time() + 3600)

    async def discover(request: web.Request) -> web.Response:
        return web.json_response({"token_endpoint": str(request.url.with_path("/token"))})

    async def refresh(request: web.Request) -> web.Response:
        assert (await request.post())["refresh_token"] == "first"
        answer = {"id_token": new, "refresh_token": "second", "access_token": "a", "token_type": "Bearer"}
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", discover)
    app.router.add_post("/token", refresh)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        settings = {
            "idp-issuer-url": f"http://{host}:{port}",
            "client-id": "kubernetes",
            "client-secret": "secret",
            "id-token": json_web_token(time.time() - 60),
            "refresh-token": "first",
        }
        file = kubeconfig(tmp_path / "c", {"auth-provider": {"name": "oidc", "config": settings}})
        found = await asyncio.to_thread(find_access, kubeconfig=file)
    finally:
        await runner.cleanup()
    assert (found.changing, found.credential.token) == (True, new)
    stored = yaml.safe_load(file.read_text())["users"][0]["user"]["auth-provider"]["config"]
    assert (stored["id-token"], stored["refresh-token"]) == (new, "second")
    # Reading the stored token needs no server.
    assert found.credentials().token == new


def test_a_provider_without_a_token_is_named(tmp_path: Path) -> None:
    with raises_naming(AccessError, "auth-provider: 'azure'", "log in again"):
        find_access(kubeconfig=kubeconfig(tmp_path / "c", {"auth-provider": {"name": "azure"}}))


def test_a_token_file_has_precedence_and_changes(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("early\n")
    found = find_access(kubeconfig=kubeconfig(tmp_path / "c", {"tokenFile": "token", "token": "other"}))
    assert (found.changing, found.credential.token) == (True, "early")
    (tmp_path / "token").write_text("late\n")
    assert found.credentials().token == "late"


def test_a_proxy_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:1")
    file = kubeconfig(tmp_path / "c", {})
    assert find_access(kubeconfig=file).proxy == "http://proxy.invalid:1"
    monkeypatch.setenv("NO_PROXY", "example.invalid")
    assert find_access(kubeconfig=file).proxy is None
    file = kubeconfig(tmp_path / "c", {}, **{"proxy-url": "http://other.invalid:2"})
    assert find_access(kubeconfig=file).proxy == "http://other.invalid:2"
    file = kubeconfig(tmp_path / "c", {}, **{"proxy-url": "socks5://other.invalid:2"})
    with raises_naming(AccessError, "proxy-url", "'socks5://other.invalid:2'", "not supported"):
        find_access(kubeconfig=file)


def test_entries_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first `current-context` and the first entry of a name apply; paths are relative to their own file."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in ("ca.pem", "me.pem", "me.key"):
            (tmp_path / folder / name).write_text(f"{folder} {name}")
    user = {"client-certificate": "me.pem", "client-key": "me.key"}
    cluster = {"server": "https://a.invalid", "certificate-authority": "ca.pem"}
    documents = {
        "a/config": {"clusters": [{"name": "c", "cluster": cluster}], "current-context": "", "users": None},
        "empty": None,
        "b/config": {
            "clusters": [{"name": "c", "cluster": {"server": "https://b.invalid"}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        },
        "last": {"current-context": "y"},
    }
    for name, document in documents.items():
        (tmp_path / name).write_text("" if document is None else yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(str(tmp_path / name) for name in documents))
    found = find_access()
    assert (found.server, found.authority) == ("https://a.invalid", "a ca.pem")
    assert (found.credential.certificate, found.credential.key) == ("b me.pem", "b me.key")


SECRET = "s3cr3t"
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.just(SECRET)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner))


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return mostly values of the expected kind, and sometimes any value."""
    return st.integers(0, 9).flatmap(lambda number: VALUES if number == 7 else good)


PLUGINS = st.fixed_dictionaries(
    {},
    optional={
        "apiVersion": mostly(st.just("client.authentication.k8s.io/v1")),
        "command": st.sampled_from(["false", "true", "no-such-program"]),
        "args": mostly(st.just(["x"])),
        "env": mostly(st.just([{"name": "A", "value": "b"}])),
    },
)
PROVIDERS = st.fixed_dictionaries(
    {}, optional={"name": mostly(st.sampled_from(["oidc", "gcp", "azure"])), "config": VALUES}
)
TEXT = mostly(st.just(base64.b64encode(PEM.encode()).decode()))
USERS = st.fixed_dictionaries(
    {},
    optional={
        "token": TEXT,
        "tokenFile": mostly(st.just("missing")),
        "client-certificate-data": TEXT,
        "client-certificate": mostly(st.just("missing")),
        "client-key-data": TEXT,
        "username": VALUES,
        "password": VALUES,
        "exec": mostly(PLUGINS),
        "auth-provider": mostly(PROVIDERS),
    },
)
CLUSTERS = st.fixed_dictionaries(
    {"server": mostly(st.sampled_from(["https://x:6443", "http://x", "https://x:99999", "x", "https://[::1"]))},
    optional={
        "certificate-authority-data": TEXT,
        "certificate-authority": mostly(st.just("missing")),
        "insecure-skip-tls-verify": mostly(st.booleans()),
        "tls-server-name": mostly(st.just("y")),
        "proxy-url": mostly(st.just("http://p")),
    },
)


def entries(kind: str, content: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    entry = st.fixed_dictionaries({"name": mostly(st.just("n")), kind: mostly(content)})
    return mostly(st.lists(mostly(entry), min_size=1, max_size=2))


CONTEXT = st.fixed_dictionaries(
    {"cluster": mostly(st.just("n")), "user": mostly(st.just("n"))}, optional={"namespace": mostly(st.just("a"))}
)
DOCUMENTS = st.fixed_dictionaries(
    {
        "contexts": entries("context", CONTEXT),
        "clusters": entries("cluster", CLUSTERS),
        "users": entries("user", USERS),
        "current-context": mostly(st.just("n")),
    }
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(documents=st.lists(mostly(DOCUMENTS), min_size=1, max_size=2))
def test_any_kubeconfig_gives_an_access_or_one_clear_error(tmp_path: Path, documents: list[Any]) -> None:
    files = [tmp_path / f"c{number}" for number in range(len(documents))]
    for file, document in zip(files, documents, strict=True):
        file.write_text(yaml.safe_dump(document))
    try:
        found = json.loads(json.dumps(load(files, None, tmp_path)))
    except KubeconfigError as error:
        message = str(error)
        assert str(tmp_path) in message
        assert "\n" not in message
        assert len(message) < 1500
        assert f"token': '{SECRET}'" not in message
    else:
        assert found["server"].startswith("http")
        assert isinstance(found["namespace"], str)
        optional = ("authority", "serverName", "proxy", "token", "certificate", "key")
        assert all(found[name] is None or isinstance(found[name], str) for name in optional)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=40))
def test_any_file_gives_an_access_or_one_clear_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "c"
    file.write_bytes(content)
    with pytest.raises(KubeconfigError, match=str(file)):
        load([file], None, tmp_path)


def test_missing_entries_are_named_with_the_available_ones(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="no cluster to speak to"):
        find_access()
    file = kubeconfig(tmp_path / "c", {})
    with pytest.raises(AccessError, match="no context 'three'; there is: one, two"):
        find_access("three", file)
    with raises_naming(AccessError, "'gone'", "'two'", "missing"):
        find_access("two", file)
    file.write_text("{")
    with pytest.raises(AccessError, match="cannot be read as a kubeconfig"):
        find_access(kubeconfig=file)
    file.write_text("{}")
    with pytest.raises(AccessError, match="no context is chosen"):
        find_access(kubeconfig=file)
