"""Files of API keys, and the forms in which clients send a key."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_runtime.contract.gateway import FatalRequest
from dsv4_runtime.gateway.admission import ApiKeys, ApiKeysError
from dsv4_runtime.gateway.http_client import Message
from dsv4_runtime.gateway.http_server import _Connection as Connection


def admits(keys, header, value):
    message = Message(SimpleNamespace())
    message.headers = [(header.lower(), header, value)]
    return keys.admit(message)


def write(tmp_path, text):
    path = tmp_path / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@pytest.mark.parametrize("header", [b"Authorization", b"x-api-key"])
@pytest.mark.parametrize("key", ["schlüssel", "ÿ", "key", "a key", "sk-#1"])
def test_a_key_is_known_in_both_encodings(tmp_path, key, header, encoding):
    keys = ApiKeys(write(tmp_path, key + "\n"))
    scheme = b"Bearer " if header == b"Authorization" else b""
    assert admits(keys, header, scheme + key.encode(encoding))
    assert not admits(keys, header, scheme + key.encode(encoding) + b"x")
    assert not admits(keys, header, scheme + key.encode("utf-16"))


def test_a_key_beyond_latin_1_is_known_in_utf_8(tmp_path):
    keys = ApiKeys(write(tmp_path, "ключ€\n"))
    assert admits(keys, b"Authorization", b"Bearer " + "ключ€".encode())


@given(
    key=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1).filter(
        lambda key: key == key.strip() and "#" not in key and not key.startswith("\ufeff")
    ),
    comment=st.sampled_from(["", " # ours", "\t#ours", " #", "   ", "\r"]),
)
def test_every_valid_key_is_admitted_with_any_comment_behind_it(tmp_path_factory, key, comment):
    keys = ApiKeys(write(tmp_path_factory.mktemp("keys"), f"# all of them\n{key}{comment}\n"))
    assert admits(keys, b"x-api-key", key.encode())
    for other in (comment.strip(), f"{key}{comment}".strip(), "# all of them", ""):
        assert admits(keys, b"x-api-key", other.encode()) == (other == key)


@pytest.mark.parametrize(
    ("text", "known", "unknown"),
    [
        ("first # of Ann\nsecond\t# of Bob\n", ["first", "second"], ["first # of Ann", "# of Ann", "of Ann", "#"]),
        ("  # indented\nkey\n", ["key"], ["# indented", "indented"]),
        ("key#1\n", ["key#1"], ["key"]),
        ("\ufeffkey\n", ["key"], ["\ufeffkey"]),
        ("one\r\ntwo\r\n", ["one", "two"], []),
        ("one\rtwo\r", ["one", "two"], []),
        ("one\x85two\u2028three\n", [], ["one"]),
    ],
)
def test_lines_and_comments(tmp_path, text, known, unknown):
    if "\x85" in text:
        keys = None
        with pytest.raises(ApiKeysError, match="control character"):
            ApiKeys(write(tmp_path, text))
        return
    keys = ApiKeys(write(tmp_path, text))
    assert all(admits(keys, b"x-api-key", key.encode()) for key in known)
    assert not any(admits(keys, b"x-api-key", key.encode()) for key in unknown)


@pytest.mark.parametrize("text", ["a\x00b\n", "a\x07\n", "a\x7f\n"])
def test_a_key_that_no_header_can_have_is_refused_with_its_line(tmp_path, text):
    with pytest.raises(ApiKeysError, match=r"keys': line 2: the key has a control character.*remove"):
        ApiKeys(write(tmp_path, "good\n" + text))


@pytest.mark.parametrize("text", ["", "\n", "# only comments\n", "   # only comments\n", " \t\n"])
def test_a_file_without_a_key_is_refused(tmp_path, text):
    with pytest.raises(ApiKeysError, match="contains no key; write one key per line"):
        ApiKeys(write(tmp_path, text))


def test_a_file_that_is_no_utf_8_is_refused(tmp_path):
    with pytest.raises(ApiKeysError, match="in UTF-8"):
        ApiKeys(write(tmp_path, "schlüssel".encode("latin-1")))


async def test_keys_of_a_secret_that_is_swapped_are_read_again(tmp_path):
    """Kubelets mount a Secret as links to a directory, and replace that directory."""
    for number, key in enumerate(("old", "new")):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "keys").write_text(key)
        os.utime(tmp_path / f"v{number}" / "keys", (1, 1))
    (tmp_path / "data").symlink_to("v0")
    (tmp_path / "keys").symlink_to("data/keys")
    keys = ApiKeys(tmp_path / "keys")
    assert admits(keys, b"x-api-key", b"old")
    (tmp_path / "next").symlink_to("v1")
    (tmp_path / "next").replace(tmp_path / "data")
    await asyncio.sleep(1.1)
    assert admits(keys, b"x-api-key", b"new")
    assert not admits(keys, b"x-api-key", b"old")


VALID = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-api-key: key\r\nContent-Length: %d\r\n\r\n%b"
BODY = json.dumps({"model": "nano", "prompt": [1, 2], "max_tokens": 1}).encode()
REQUESTS = {
    "valid": (VALID % (len(BODY), BODY), 200),
    "own path": (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 200),
    "no key": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 401),
    "wrong key": (VALID.replace(b": key", b": other") % (len(BODY), BODY), 401),
    "unknown path": (b"GET /nothing HTTP/1.1\r\nHost: x\r\nx-api-key: key\r\n\r\n", 404),
}


@pytest.mark.parametrize("seed", range(12))
async def test_pipelined_requests_with_and_without_a_key_are_answered_in_order(kit, seed):
    chance = random.Random(seed)
    names = chance.choices(list(REQUESTS), k=40)
    sent = b"".join(REQUESTS[name][0] for name in names)
    async with kit.Lab(keys="key\n") as lab:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]))
        parts = sorted(chance.sample(range(1, len(sent)), chance.choice((0, 3, 30))))
        for start, end in pairwise([0, *parts, len(sent)]):
            writer.write(sent[start:end])
            await asyncio.sleep(0)
        found = []
        async with asyncio.timeout(60):
            for _ in names:
                head = await reader.readuntil(b"\r\n\r\n")
                found.append(int(head[9:12]))
                if b"chunked" in head.lower():
                    await reader.readuntil(b"\r\n0\r\n\r\n")
                else:
                    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))
        assert found == [REQUESTS[name][1] for name in names]
        writer.close()


async def test_refusals_that_are_not_read_are_not_gathered(kit):
    async with kit.Lab(keys="key\n") as lab:
        _, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rsplit(":", 1)[1]), limit=2**10)
        writer.transport.set_write_buffer_limits(high=2**16)
        refused = REQUESTS["no key"][0] * 1000
        sent = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                while sent < 2000:
                    writer.write(refused)
                    await writer.drain()
                    sent += 1
        assert sent < 2000
        kept = [one for one in gc.get_objects() if type(one) is Connection and one.transport is not None]
        assert kept
        assert max(one.transport.get_write_buffer_size() for one in kept) < 2**18
        assert lab.gateway._account.used < 4 * 2**20
        writer.transport.abort()
        assert (await lab.post("/v1/completions", BODY, headers={"x-api-key": "key"}))[0] == 200


async def test_the_log_of_refusals_is_bounded_and_names_them_all(kit, caplog):
    caplog.set_level("INFO")
    async with kit.Lab(keys="key\n") as lab:
        for _ in range(200):
            async with lab.client.post(lab.url + "/v1/completions", data=BODY, headers={"X-Request-Id": "mine"}) as got:
                assert (got.status, got.headers["X-Request-Id"], got.headers["WWW-Authenticate"]) == (
                    401,
                    "mine",
                    "Bearer",
                )
        assert await lab.metric('dsv4_gateway_refused_total{code="invalid_api_key"}') == 200
        assert await lab.metric('dsv4_gateway_requests_total{outcome="unauthorized"}') == 200
    lines = [record.getMessage() for record in caplog.records if record.name == "dsv4.gateway.access"]
    own = [line for line in lines if "refused=invalid_api_key" in line]
    assert all(line.startswith("mine 127.0.0.1 POST /v1/completions status=401 outcome=unauthorized") for line in own)
    counted = [int(line.split()[0]) for line in lines if "more requests were refused: invalid_api_key=" in line]
    assert len(own) + sum(counted) == 200
    assert len(own) < 100


@pytest.mark.parametrize("header", [b"Authorization: Bearer schl\xc3\xbcssel", b"x-api-key: schl\xfcssel"])
async def test_fatal_requests_of_all_processes_are_shown_for_each_form_of_a_key(kit, header):
    async with (
        kit.Lab(keys="schlüssel\n") as other,
        kit.Lab(keys="schlüssel\n", peers=(other.url,)) as lab,
    ):
        other.gateway._proxy.suspects._found.append(FatalRequest(id="found", size=1, engines=3, time=1.0))
        reader, writer = await asyncio.open_connection("127.0.0.1", int(lab.url.rpartition(":")[2]))
        writer.write(b"GET /dsv4/fatal-requests HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%b\r\n\r\n" % header)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert [one["id"] for one in json.loads(answer.partition(b"\r\n\r\n")[2])["requests"]] == ["found"]
