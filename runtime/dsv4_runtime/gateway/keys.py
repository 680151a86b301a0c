"""API keys from a file."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import time
from pathlib import Path

from dsv4_runtime.contract.gateway import api_keys
from dsv4_runtime.gateway.http1 import Message

_log = logging.getLogger("dsv4.gateway")
_LOOK_SECONDS = 1.0


class KeysError(Exception):
    """The file cannot be used; the text names the reason and the remedy."""


class Keys:
    """The keys of a file: UTF-8, one a line; a `#` at the beginning or after a blank begins a comment.

    Keys beyond ASCII are compared as bytes: clients send them in UTF-8 or in Latin-1. The file is read again on change.
    """

    def __init__(self, path: Path) -> None:
        """Read the keys.

        Raises:
            KeysError: there is no such file, no key in it, or one that cannot be sent.
        """
        self._path = path
        self._stamp = self._look()
        self._digests = self._read()
        if not self._digests:
            raise KeysError(f"spec.gateway.apiKeys: the file {str(self._path)!r} has no key; write one a line")
        self._looked = time.monotonic()

    def admit(self, message: Message) -> bool:
        """Return whether `Authorization: Bearer` or `x-api-key` has one of the keys; as slowly for any wrong one."""
        self._refresh()
        scheme, _, given = message.header(b"authorization").partition(" ")
        if scheme.lower() != "bearer":
            given = message.header(b"x-api-key")
        # Headers are decoded as Latin-1: this gives the bytes as they came.
        digest = _digest(given.strip(" \t").encode("latin-1"))
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found

    def _refresh(self) -> None:
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._digests, self._stamp = self._read(), stamp
        except KeysError as error:
            _log.warning("the keys of before stay: %s", error)
            return
        if not self._digests:
            _log.warning(
                "spec.gateway.apiKeys: the file %s has no key any more: nobody may ask; write one a line", self._path
            )

    def _look(self) -> tuple[int, int, int]:
        """Return what changes with the file.

        Raises:
            KeysError: there is no such file.
        """
        try:
            found = self._path.stat()
        except OSError as error:
            raise KeysError(
                f"spec.gateway.apiKeys: the file {str(self._path)!r}: {error}; name a file of keys"
            ) from error
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[bytes, ...]:
        """Return the digests of the keys: none if the file has none.

        Raises:
            KeysError: the file cannot be read, or has a key that cannot be sent.
        """
        try:
            keys = api_keys(self._path.read_bytes().decode())
        except (OSError, ValueError) as error:
            raise KeysError(
                f"spec.gateway.apiKeys: the file {str(self._path)!r}: {error}; name a file of keys in UTF-8"
            ) from error
        return tuple({_digest(form) for key in keys for form in _forms(key)})


def _forms(key: str) -> list[bytes]:
    """Return the bytes that clients send for a key: in UTF-8, and in Latin-1 where it has that form."""
    forms = [key.encode()]
    with contextlib.suppress(UnicodeEncodeError):
        forms.append(key.encode("latin-1"))
    return forms


def _digest(key: bytes) -> bytes:
    # Of one length, so that comparing tells nothing about a key's own.
    return hashlib.sha256(key).digest()
