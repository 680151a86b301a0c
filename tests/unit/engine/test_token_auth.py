"""vLLM's own port refuses requests without the incarnation's token on every path."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from dsv4_runtime.engine import token_auth

TOKEN = "c0ffee"


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv(token_auth.TOKEN_VARIABLE, str(file))
    return file


async def ask(kind: str, headers: list[tuple[bytes, bytes]], path: str = "/health") -> list[MutableMapping[str, Any]]:
    said: list[MutableMapping[str, Any]] = []

    async def app(_: object, __: object, send: token_auth.Send) -> None:
        await send({"type": "inside"})

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nobody reads what a stranger sends")

    async def send(message: MutableMapping[str, Any]) -> None:
        said.append(message)

    await token_auth.TokenAuth(app)({"type": kind, "path": path, "headers": headers}, receive, send)
    return said


def sent(value: str) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), text.encode()) for name, text in token_auth.headers(value).items()]


@pytest.mark.usefixtures("token_file")
@pytest.mark.parametrize("path", ["/health", "/metrics", "/invocations", "/v1/completions"])
async def test_the_token_opens_everything_and_nothing_else_does(path: str) -> None:
    assert await ask("http", sent(TOKEN), path) == [{"type": "inside"}]
    for wrong in ([], sent(""), sent("c0ffe"), sent(f"{TOKEN}\n"), [(b"authorization", f"Bearer {TOKEN}".encode())]):
        begun, body = await ask("http", wrong, path)
        assert begun["status"] == 401
        assert dict(begun["headers"])[b"content-length"] == str(len(body["body"])).encode()


@pytest.mark.usefixtures("token_file")
async def test_a_websocket_without_it_is_closed_and_the_servers_own_life_is_not() -> None:
    assert await ask("websocket", []) == [{"type": "websocket.close", "code": 1008}]
    assert await ask("websocket", sent(TOKEN)) == [{"type": "inside"}]
    assert await ask("lifespan", []) == [{"type": "inside"}]


def test_without_a_token_vllm_does_not_start(token_file: Path) -> None:
    token_file.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        token_auth.TokenAuth(None)  # type: ignore[arg-type]
    token_file.unlink()
    with pytest.raises(FileNotFoundError):
        token_auth.TokenAuth(None)  # type: ignore[arg-type]
