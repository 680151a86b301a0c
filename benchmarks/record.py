"""Record an engine's death and recovery: `python benchmarks/record.py` writes docs/images/recovery.svg.

The commands are real: `dsv4 up` starts the nano model, `dsv4 chat` streams a response through the gateway, SIGKILL ends
the EngineCore process, and the same response continues after the restart. The recorded events are stored in
`recovery.json` next to the picture; `--render` draws the picture from them without a run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from dsv4_testkit.harness import pid_in

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "recovery.svg"
NAME = "nano"
UP = "dsv4 up examples/nano.yaml --detach"
CHAT = f'dsv4 chat {NAME} "Where is the river?" --max-tokens 400 --no-thinking'
WHY = f"dsv4 why {NAME}"
STREAMED = 300
"""Characters of the response before the kill."""

COLUMNS = 100
ROWS = {"chat": 13, "control": 13}
LINE, CHARACTER, MARGIN = 18, 8.4, 16
LONGEST_GAP = 1.2
"""Seconds of playback for longer waits."""
SPEED = 4
"""Ratio of playback speed to the run."""
STEP = 0.4
"""Output within this many seconds of the run is shown together."""
FINAL = 6.0
"""Seconds of the last picture."""


@dataclass(frozen=True)
class Event:
    """Text that one pane shows at a time.

    Attributes:
        at: seconds since the start of the recording.
        pane: `chat` or `control`.
        text: may contain newlines.
        style: CSS class: `command`, `output`, `kill` or `state`.
    """

    at: float
    pane: str
    text: str
    style: str = "output"


class Recording:
    """Events in the order in which they occurred."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def add(self, pane: str, text: str, style: str = "output") -> None:
        with self._lock:
            self.events.append(Event(round(time.monotonic() - self._start, 2), pane, text, style))


class Stream:
    """A command on a pseudo-terminal whose output is recorded as it arrives."""

    def __init__(self, recording: Recording, pane: str, command: list[str], environment: dict[str, str]) -> None:
        self.length = 0
        self._recording, self._pane = recording, pane
        self._terminal, terminal = pty.openpty()
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, cwd=ROOT
        )
        os.close(terminal)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # The end of a pseudo-terminal is an OSError (EIO).
        with contextlib.suppress(OSError):
            while data := os.read(self._terminal, 65536):
                text = data.decode(errors="replace").replace("\r", "")
                self.length += len(text)
                self._recording.add(self._pane, text)

    def wait(self, timeout: float) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5.0)
        os.close(self._terminal)
        return code


def record() -> dict[str, Any]:
    """Run the demonstration in its own state directory.

    Raises:
        RuntimeError: a step failed or the response did not survive the kill.
    """
    # Short because of the length limit of Ray's sockets.
    root = Path(tempfile.mkdtemp(prefix="d4-"))
    compiled = Path(tempfile.gettempdir()) / "dsv4-compiled"
    compiled.mkdir(exist_ok=True)
    (root / "cache").symlink_to(compiled)
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    environment = {**os.environ, "DSV4_STATE_DIR": str(root), "NO_COLOR": "1", "PATH": path, "COLUMNS": str(COLUMNS)}
    recording = Recording()

    def run(command: str, timeout: float) -> str:
        done = subprocess.run(
            shlex.split(command),
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    try:
        recording.add("control", f"$ {UP}\n", "command")
        shown = [
            line for line in run(f"{UP} --timeout 300s", 330.0).splitlines() if line.startswith((NAME, "endpoint"))
        ]
        recording.add("control", "\n".join(shown[:2]) + "\n\n")
        status = root / NAME / "object.json"
        pid = pid_in(json.loads(status.read_text())["status"]["groups"][0], 0, "engine-core")
        # By then a process that has imported vLLM is ready for the next engine.
        time.sleep(25.0)
        recording.add("chat", f"$ {CHAT}\n", "command")
        chat = Stream(recording, "chat", shlex.split(CHAT), environment)
        _until(lambda: chat.length >= STREAMED or chat.process.poll() is not None, 60.0)
        recording.add("control", f"$ kill -9 {pid}    # EngineCore of the engine that writes this answer\n", "kill")
        os.kill(pid, signal.SIGKILL)
        killed, before = time.monotonic(), chat.length
        phases = ["Serving"]

        def observe() -> bool:
            with contextlib.suppress(OSError, ValueError):
                phase = json.loads(status.read_text())["status"]["groups"][0]["phase"]
                if phase != phases[-1]:
                    phases.append(phase)
                    recording.add("control", f"  {time.monotonic() - killed:5.1f} s  group 0: {phase}\n", "state")
            return chat.process.poll() is not None

        _until(observe, 180.0)
        if chat.wait(5.0) != 0 or chat.length <= before or "Restarting" not in phases:
            raise RuntimeError(f"the answer did not survive: exit {chat.process.returncode}, phases {phases}")
        recording.add("chat", "\n$ ", "command")
        recording.add("control", f"\n$ {WHY}\n", "command")
        recording.add("control", "\n".join(run(WHY, 60.0).rstrip().splitlines()[:5]) + "\n")
    finally:
        subprocess.run(["dsv4", "down", NAME], env=environment, capture_output=True, timeout=120, check=False, cwd=ROOT)
        shutil.rmtree(root, ignore_errors=True)
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}, no GPU; nano model; {time.strftime('%Y-%m-%d')}"
    return {"machine": machine, "events": [asdict(event) for event in recording.events]}


def _until(done: Callable[[], object], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not finished after {timeout:.0f} s")
        time.sleep(0.1)


@dataclass
class Piece:
    """A run of characters in one line of a pane."""

    at: float
    line: int
    column: int
    text: str
    style: str


def layout(events: list[Event], pane: str) -> list[Piece]:
    """Return the pieces of a pane; `chat` is wrapped at `COLUMNS`, `control` is cut there."""
    pieces: list[Piece] = []
    line = column = 0
    for event in (event for event in events if event.pane == pane):
        for index, part in enumerate(event.text.split("\n")):
            if index:
                line, column = line + 1, 0
            if pane == "control" and len(part) > COLUMNS:
                part = part[: COLUMNS - 1] + "…"
            while part:
                # Wrap at words where possible.
                taken = part[: COLUMNS - column]
                if len(taken) < len(part) and " " in taken:
                    taken = taken[: taken.rindex(" ") + 1]
                if taken:
                    last = pieces[-1] if pieces else None
                    if last and last.line == line and last.at == event.at and last.style == event.style:
                        last.text += taken
                    else:
                        pieces.append(Piece(event.at, line, column, taken, event.style))
                part = part[len(taken) :]
                column += len(taken)
                if part:
                    line, column = line + 1, 0
    return pieces


def playback(events: list[Event]) -> dict[float, float]:
    """Return the time of playback for each time of the recording; long waits are shortened to `LONGEST_GAP`."""
    shown, last, at = {}, 0.0, 0.0
    for event in sorted(events, key=lambda event: event.at):
        at += min((event.at - last) / SPEED, LONGEST_GAP)
        shown[event.at], last = at, event.at
    return shown


def merged(events: list[Event]) -> list[Event]:
    """Return the events with streamed output gathered in steps of `STEP` seconds."""
    out: list[Event] = []
    for event in events:
        last = next((item for item in reversed(out) if item.pane == event.pane), None)
        if last and event.style == last.style == "output" and event.at - last.at < STEP:
            out[out.index(last)] = Event(last.at, last.pane, last.text + event.text, last.style)
        else:
            out.append(event)
    return out


def render(recording: dict[str, Any]) -> str:
    """Return the animated SVG. Without animation it shows the last picture."""
    events = merged([Event(**event) for event in recording["events"]])
    times = playback(events)
    total = max(times.values()) + FINAL
    css: dict[str, str] = {}

    def appears(at: float) -> str:
        name = f"t{round(times[at] * 100)}"
        share = 100 * times[at] / total
        css[name] = f"@keyframes {name}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}"
        return name

    width = int(COLUMNS * CHARACTER + 2 * MARGIN)
    body: list[str] = []
    top = 8
    for pane, title in (("control", "terminal 1"), ("chat", "terminal 2")):
        height = ROWS[pane] * LINE + 34
        body.append(f'<rect class="pane" x="4" y="{top}" width="{width - 8}" height="{height}" rx="8"/>')
        body.append(f'<text class="title" x="{MARGIN}" y="{top + 18}">{title}</text>')
        if pane == "control":
            body += _clock(times, total, css, width - MARGIN, top + 18)
        pieces = layout(events, pane)
        body.append(f'<svg x="0" y="{top + 26}" width="{width}" height="{ROWS[pane] * LINE + 4}">')
        scroll = _scroll(pieces, ROWS[pane], times, total)
        style = f' style="animation:{pane} {total:.2f}s step-end infinite"' if scroll else ""
        if scroll:
            css[pane] = f"@keyframes {pane}{{{scroll}}}"
        shift = max(0, max(piece.line for piece in pieces) + 1 - ROWS[pane]) * LINE
        body.append(f'<g transform="translate(0,{-shift})"><g{style}>')
        for piece in pieces:
            text = piece.text.strip()
            if not text:
                continue
            column = piece.column + len(piece.text) - len(piece.text.lstrip())
            x, y = MARGIN + column * CHARACTER, piece.line * LINE + 14
            # No-break spaces keep their width in every renderer.
            body.append(
                f'<text class="{piece.style}" x="{x:.1f}" y="{y}" textLength="{len(text) * CHARACTER:.1f}" '
                f'style="animation-name:{appears(piece.at)}">{escape(text).replace(" ", chr(160))}</text>'
            )
        body.append("</g></g></svg>")
        top += height + 8
    label = f"{recording['machine']}. {SPEED} times as fast, longer waits are cut; the clock shows the real time."
    body.append(f'<text class="title" x="{MARGIN}" y="{top + 10}">{escape(label)}</text>')
    height = top + 20
    style = f"""
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;fill:#c9d1d9}}
svg svg text{{animation-duration:{total:.2f}s;animation-iteration-count:infinite}}
.page{{fill:#0d1117}}.pane{{fill:#161b22;stroke:#30363d}}
.title,.clock{{font-size:12px;fill:#8b949e}}.clock{{text-anchor:end;opacity:0}}
.command{{fill:#58a6ff}}.kill{{fill:#ff7b72}}.state{{fill:#d29922}}
@media (prefers-reduced-motion:reduce){{*{{animation:none!important}}}}
"""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="title"><title id="title">An engine is killed while it streams an answer; '
        f"after the restart the same answer continues</title><style>{style}{''.join(css.values())}</style>"
        f'<rect class="page" width="{width}" height="{height}" rx="10"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _scroll(pieces: list[Piece], rows: int, times: dict[float, float], total: float) -> str:
    """Return keyframes that move a pane up while it fills, relative to its last position."""
    hidden = max(0, max(piece.line for piece in pieces) + 1 - rows)
    frames, reached = [f"0%{{transform:translateY({hidden * LINE}px)}}"], 0
    for piece in pieces:
        past = piece.line + 1 - rows
        if past > reached:
            reached = past
            frames.append(f"{100 * times[piece.at] / total:.2f}%{{transform:translateY({(hidden - past) * LINE}px)}}")
    return "".join(frames) if hidden else ""


def _clock(times: dict[float, float], total: float, css: dict[str, str], x: int, y: int) -> list[str]:
    """Return one text for each second of the recording in which something is shown."""
    seconds: dict[int, float] = {}
    for at, shown in sorted(times.items()):
        seconds.setdefault(int(at), shown)
    items = list(seconds.items())
    out = []
    for index, (second, begin) in enumerate(items):
        end = items[index + 1][1] if index + 1 < len(items) else total
        name, from_, to = f"c{second}", 100 * begin / total, min(100.0, 100 * end / total)
        css[name] = (
            f"@keyframes {name}{{0%{{opacity:0}}{from_:.2f}%{{opacity:1}}{to:.2f}%,100%{{opacity:{int(to == 100)}}}}}"
        )
        last = "opacity:1;" if index + 1 == len(items) else ""
        out.append(
            f'<text class="clock" x="{x}" y="{y}" '
            f'style="{last}animation:{name} {total:.2f}s step-end infinite">{second} s</text>'
        )
    return out


def _lines(recording: dict[str, Any]) -> str:
    """Return the recording as JSON with one event per line."""
    machine = json.dumps(recording["machine"])
    events = ",\n".join(json.dumps(event, ensure_ascii=False) for event in recording["events"])
    return f'{{"machine": {machine}, "events": [\n{events}\n]}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--render", action="store_true", help="draw the picture from the recorded events")
    options = parser.parse_args()
    events = PICTURE.with_suffix(".json")
    if not options.render:
        events.write_text(_lines(record()))
    PICTURE.write_text(render(json.loads(events.read_text())))
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
