"""Server-sent events, as far as an OpenAI-compatible stream uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """The lines of a stream of bytes.

    Only `\\n` and `\\r\\n` end a line: `str.splitlines` and what builds on it also cut at characters like U+2028, which
    JSON text may hold as they are.
    """
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def events(stream: Iterable[str]) -> Iterator[str]:
    """The data of every event in a stream of lines; comments and other fields are skipped."""
    data: list[str] = []
    for line in stream:
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
    # A stream that ends without the blank line still said this.
    if data:
        yield "\n".join(data)
