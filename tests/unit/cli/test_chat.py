from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from dsv4_operator.api import DeploymentPhase
from dsv4_operator.cli import chat
from dsv4_operator.cli.chat import AnswerOptions, ChatAnswer, ChatError, ChatSettings
from dsv4_operator.cli.output import CommandError, ExitCode
from dsv4_operator.cli.sources.local import LocalSource


def chunk(text: str | None = None, finish: str | None = None, tokens: int | None = None) -> bytes:
    document: dict[str, object] = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
    if tokens is not None:
        document = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}
    return f"data: {json.dumps(document, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


class Server:
    """OpenAI-compatible server with prepared responses."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.paused, self.over = threading.Event(), threading.Event()
        self.answers: list[tuple[int, list[bytes | float]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                code, parts = outer.answers.pop(0)
                self.send_response(code)
                self.end_headers()
                for part in parts:
                    if isinstance(part, float):
                        outer.paused.set()
                        outer.over.wait(part)
                    else:
                        self.wfile.write(part)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def settings(self, **more: Any) -> ChatSettings:
        options = {"max_tokens": None, "system": None, "thinking": None, "silence_seconds": 60.0, **more}
        return ChatSettings(self.endpoint, "nano", AnswerOptions(**options))

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def test_lines_end_only_at_the_protocols_line_ends() -> None:
    stream = "data: a\u2028b\x85c\r\n\r\ndata: d".encode()
    for cut in range(len(stream)):
        assert list(chat.events([stream[:cut], stream[cut:]])) == ["a\u2028b\x85c", "d"]


def test_events_have_their_lines_joined_and_comments_are_skipped() -> None:
    stream = b"event: x\ndata: 1\n\n: ping\n\ndata:2\ndata: 3\n\ndata: 4"
    assert list(chat.events([stream])) == ["1", "2\n3", "4"]


def test_once(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers.append(
        (200, [chunk(""), chunk("Hé"), chunk("llo\u2028!"), chunk(None, "stop"), chunk(tokens=7), DONE])
    )
    assert (
        chat.answer_once(server.settings(max_tokens=9, system="Be short.", thinking=False), "Hi", terminal=True)
        is ExitCode.OK
    )
    out, err = capsys.readouterr()
    assert out == "Héllo\u2028!\n"
    assert err.startswith("[7 tokens")
    assert server.requests == [
        {
            "model": "nano",
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 9,
            "chat_template_kwargs": {"thinking": False},
        }
    ]


@pytest.mark.parametrize(
    ("code", "parts", "message"),
    [
        (404, [b'{"error": {"message": "no model x", "code": 404}}'], "answered 404: no model x"),
        (503, [b"<html>gone</html>"], "answered 503: <html>gone</html>"),
        (200, [chunk("He"), b'data: {"error": {"message": "EngineCore died"}}\n\n'], "broke off: EngineCore died"),
        (200, [chunk("He")], "broke off before its end"),
        (200, [b"data: nonsense\n\n"], "no part of a chat answer: nonsense"),
        (200, [b"data: 7\n\n"], "no part of a chat answer: 7"),
    ],
)
def test_errors(server: Server, code: int, parts: list[bytes | float], message: str) -> None:
    server.answers.append((code, parts))
    with pytest.raises(ChatError, match=message):
        chat.answer_once(server.settings(), "Hi", terminal=False)


def test_silence_is_bounded(server: Server) -> None:
    server.answers.append((200, [chunk("He"), 60.0]))
    with pytest.raises(ChatError, match=r"sent nothing for 0\.3 s"):
        chat.answer_once(server.settings(silence_seconds=0.3), "Hi", terminal=False)


def test_a_closed_port_is_an_error() -> None:
    with pytest.raises(ChatError, match="does not answer"):
        chat.answer_once(
            ChatSettings("http://127.0.0.1:9/v1", "nano", AnswerOptions(None, None, None, 1.0)), "Hi", terminal=False
        )


def test_a_conversation_keeps_its_earlier_messages(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers += [(200, [chunk("One."), DONE]), (503, [b"{}"]), (200, [chunk("Two."), DONE])]
    prompts = iter(["first", "", "lost", "second"])

    def read(_: str) -> str:
        try:
            return next(prompts)
        except StopIteration:
            raise EOFError from None

    assert chat.converse(server.settings(), read=read) is ExitCode.OK
    out, err = capsys.readouterr()
    assert out == "One.\nTwo.\n"
    assert "error: " in err
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["first", "One.", "second"]


@pytest.mark.parametrize("before", [[], [chunk("One")]])
def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, before: list[bytes | float]
) -> None:
    server.answers += [(200, [*before, 60.0]), (200, [chunk("Two."), DONE])]
    prompts = iter(["first", "second"])

    def read(_: str) -> str:
        try:
            return next(prompts)
        except StopIteration:
            raise EOFError from None

    events, written = chat.events, threading.Event()

    def told(chunks: Iterable[bytes]) -> Iterator[str]:
        if not before:
            written.set()
        for event in events(chunks):
            yield event
            # The next one is asked for, so this one was written.
            written.set()

    monkeypatch.setattr(chat, "events", told)

    def interrupt() -> None:
        server.paused.wait(60)
        written.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert chat.converse(server.settings(), read=read) is ExitCode.OK
    thread.join()
    out, err = capsys.readouterr()
    assert out == ("One\nTwo.\n" if before else "Two.\n")
    assert "[stopped]" in err
    kept = ["first", "One", "second"] if before else ["second"]
    assert [message["content"] for message in server.requests[-1]["messages"]] == kept


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:"])
def test_a_broken_connection_is_one_error(head: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(head)

        thread = threading.Thread(target=serve)
        thread.start()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        settings = ChatSettings(endpoint, "nano", AnswerOptions(None, None, None, 60.0))
        with pytest.raises(ChatError, match=r"the answer broke off \(.+\); see `dsv4 why`"):
            chat.answer_once(settings, "Hi", terminal=False)
        thread.join()


def test_speed_leaves_the_first_token_out() -> None:
    answer = ChatAnswer(["a", "b"], reported_tokens=11, first_piece=5.0, last_piece=7.0)
    assert answer.speed() == "11 tokens, 5.0 tokens/s"
    assert ChatAnswer(["a"], first_piece=1.0, last_piece=1.0).speed() == "1 token"


def test_prompt_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", StringIO("from a pipe\n"))
    assert chat.read_prompt(None) == "from a pipe\n"
    assert chat.read_prompt("given") == "given"
    with pytest.raises(CommandError, match="empty"):
        chat.read_prompt(" ")


def test_a_lone_argument_is_a_name_only_if_there_is_one(root: Path, saved: Callable[..., Any]) -> None:
    saved()
    assert chat.split_arguments(LocalSource(root), "nano", None) == ("nano", None)
    assert chat.split_arguments(LocalSource(root), "Hello", None) == (None, "Hello")
    assert chat.split_arguments(LocalSource(root), "nano", "Hello") == ("nano", "Hello")
    assert chat.split_arguments(LocalSource(root), None, None) == (None, None)
    assert chat.split_arguments(LocalSource(root), "../nano\0", None) == (None, "../nano\0")


def test_a_chat_is_permitted_while_the_deployment_recovers(
    root: Path, saved: Callable[..., Any], held: Callable[..., int], make: Any
) -> None:
    held(saved(make.status(ready=False, phase=DeploymentPhase.RECOVERING)))
    chat.check_serving(LocalSource(root).get(None))


def test_a_chat_with_a_deployment_that_does_not_serve_is_refused_with_its_phase(
    root: Path, saved: Callable[..., Any], held: Callable[..., int], make: Any
) -> None:
    state = saved(make.status(ready=False, endpoint=None))
    with pytest.raises(CommandError, match="nano is not serving: it is Stopped"):
        chat.run(LocalSource(root), None, "Hi", AnswerOptions(None, None, None, 1.0))
    held(state)
    with pytest.raises(CommandError, match="nano is not serving: it is Starting"):
        chat.run(LocalSource(root), None, "Hi", AnswerOptions(None, None, None, 1.0))
