"""Files of API keys, and the forms in which clients send a key."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_runtime.gateway.admission import ApiKeys, ApiKeysError
from dsv4_runtime.gateway.http1 import Message


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
def test_any_key_that_can_be_sent_is_known_whatever_follows_it(tmp_path_factory, key, comment):
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
    with pytest.raises(ApiKeysError, match="has no key; write one a line"):
        ApiKeys(write(tmp_path, text))


def test_a_file_that_is_no_utf_8_is_refused(tmp_path):
    with pytest.raises(ApiKeysError, match="in UTF-8"):
        ApiKeys(write(tmp_path, "schlüssel".encode("latin-1")))


async def test_keys_of_a_secret_that_is_swapped_are_read_again(tmp_path):
    """Kubelets mount a Secret as links to a directory that they replace."""
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
