"""How fast weights move, and what a kill costs: `python benchmarks/weights.py`, as root for the network namespaces.

Prefetch against `dd` of the same file with a cold page cache; staging from member to member against `iperf3` over the
same link between two network namespaces; 50 kills of a staging at random bytes. Prints tables with the machine.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web
from weights_servers import TOKEN, FileServer, Reporter, Server, write_shard, write_sums

from dsv4_runtime.agent import http
from dsv4_runtime.contract import WeightsPlan, WeightsSource
from dsv4_runtime.weights import cache
from dsv4_runtime.weights.fetch import CHUNK_BYTES
from dsv4_runtime.weights.job import Job, News
from dsv4_runtime.weights.share import Share
from dsv4_runtime.weights.store import Store

GIB = 1 << 30
SERVER, CLIENT = "10.77.0.1", "10.77.0.2"
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": ""}
STAGE = [sys.executable, "-m", "dsv4_runtime.weights.main", "stage"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="disk to measure")
    parser.add_argument("--size", type=float, default=2.0, help="GiB to move in each run")
    parser.add_argument("--runs", type=int, default=5, help="of each side, taking turns")
    parser.add_argument("--rates", default="2500,10000,0", help="Mbit/s of the link, 0 for as fast as it goes")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--only", choices=("prefetch", "members", "kills"))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    now = datetime.datetime.now(datetime.UTC)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    print(f"{os.cpu_count()} × {cpu()}, {memory:.0f} GiB, Linux {platform.release()}, {now:%Y-%m-%d}\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="d4-weights-", dir=options.directory) as root:
        for name, part in (("prefetch", prefetch), ("members", members), ("kills", kills)):
            if options.only in (None, name):
                part(Path(root) / name, options)


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def rates(values: list[float]) -> str:
    return f"{statistics.median(values) / 1e6:.0f} ({min(values) / 1e6:.0f} to {max(values) / 1e6:.0f})"


# Prefetch.


def prefetch(root: Path, options: Any) -> None:
    root.mkdir()
    files = [root / f"{number}.safetensors" for number in range(2)]
    for number, file in enumerate(files):
        write_big(file, int(options.size * GIB / 2), number)
    size = sum(file.stat().st_size for file in files)
    mine, theirs = [], []
    for _ in range(options.runs):
        cache.drop(files)
        begun = time.monotonic()
        for file in files:
            subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=8M"], check=True, stderr=subprocess.DEVNULL)
        theirs.append(size / (time.monotonic() - begun))
        cache.drop(files)
        begun = time.monotonic()
        assert cache.warm(files, size, lambda *_: None) == size
        mine.append(size / (time.monotonic() - begun))
    print("| cold read of the same files | MB/s, median (range) | ratio |\n|---|---|---|")
    print(f"| `dd bs=8M` | {rates(theirs)} | 1 |")
    print(f"| prefetch | {rates(mine)} | {statistics.median(mine) / statistics.median(theirs):.2f} |\n", flush=True)


def write_big(path: Path, size: int, seed: int) -> None:
    """Random bytes, so that nothing on the way can make them fewer, in a safetensors file; all of it on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shard(path, 1, "t", seed)
    block = random.Random(seed).randbytes(1 << 24)
    header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, size, len(block)):
            stream.write(block[: min(len(block), size - start)])
        stream.flush()
        os.fsync(stream.fileno())


# Member to member.


def plan_for(folder: Path, streams: int) -> WeightsPlan:
    return WeightsPlan(source=WeightsSource.HTTP, path=str(folder), origin="http://192.0.2.1/none", streams=streams)


def serve(folder: Path) -> None:
    """What a member's agent serves, in a process of its own, as there."""
    share = Share(plan_for(folder, 1))
    share.heard(News(stance="Complete"))  # type: ignore[arg-type]
    app = http.application(Reporter(), TOKEN)  # type: ignore[arg-type]
    share.add_to(app)
    web.run_app(app, host=SERVER, port=8080, print=None, access_log=None)


def members(root: Path, options: Any) -> None:
    for program in ("iperf3", "ip", "tc"):
        if shutil.which(program) is None:
            print(f"member to member: left out, {program} is not installed\n")
            return
    source = root / "source"
    for number in range(options.streams):
        write_big(source / f"{number}.safetensors", int(options.size * GIB / options.streams), number)
    (source / "config.json").write_text("{}")
    write_sums(source)
    marked(source)
    size = sum(path.stat().st_size for path in source.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    print(
        f"| link, Mbit/s | `iperf3 -P {options.streams}` MB/s, median (range) | staged MB/s, median (range) | ratio |"
    )
    print("|---|---|---|---|")
    for rate in map(int, options.rates.split(",")):
        with ExitStack() as stack:
            link(stack, rate)
            server = start(stack, ["a", sys.executable, __file__, "--serve", str(source)])
            mine, theirs = [], []
            for run in range(options.runs):
                theirs.append(iperf(options.streams))
                target = root / f"copy-{run}"
                job = Job(
                    weights=plan_for(target, options.streams), rank=1, members={0: f"http://{SERVER}:8080"}, token=TOKEN
                )
                begun = time.monotonic()
                news = stage(job, ["ip", "netns", "exec", "d4w-b"])
                took = time.monotonic() - begun
                assert news.error is None, news.error
                assert news.fetched == size
                # The process says how long it staged; Python's start is not the network's.
                mine.append(size / min(took, float((news.stage or "").split(" in ")[1].split(" ")[0])))
                shutil.rmtree(target)
            memory = psutil.Process(server.pid).memory_info().rss >> 20
        ratio = statistics.median(mine) / statistics.median(theirs)
        print(f"| {rate or 'not limited'} | {rates(theirs)} | {rates(mine)} | {ratio:.2f} |", flush=True)
    print(f"\nthe process that served has {memory} MiB\n", flush=True)


def marked(folder: Path) -> None:
    """Note manifest and marker, as a staging would have."""
    from dsv4_runtime.weights.manifest import Manifest, ManifestFile

    plan = plan_for(folder, 1)
    store = Store(folder, plan.identity)
    rows = [line.split() for line in (folder / "SHA256SUMS").read_text().splitlines()]
    files = [ManifestFile(name=name, size=(folder / name).stat().st_size, sha256=digest) for digest, name in rows]
    store.note_manifest(Manifest(identity=plan.identity, files=tuple(files)))
    for file in files:
        store.note(file, file.sha256 or "")


def link(stack: ExitStack, rate: int) -> None:
    """Two namespaces and a pair of interfaces between them, of `rate` Mbit/s."""
    for name in ("a", "b"):
        run(f"ip netns add d4w-{name}")
        stack.callback(run, f"ip netns del d4w-{name}")
    run("ip link add d4w0 mtu 9000 netns d4w-a type veth peer name d4w0 mtu 9000 netns d4w-b")
    for name, address in (("a", SERVER), ("b", CLIENT)):
        run(f"ip -n d4w-{name} addr add {address}/24 dev d4w0")
        run(f"ip -n d4w-{name} link set d4w0 up")
        if rate:
            run(f"ip netns exec d4w-{name} tc qdisc add dev d4w0 root tbf rate {rate}mbit burst 4mb latency 20ms")


def start(stack: ExitStack, command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["ip", "netns", "exec", f"d4w-{command[0]}", *command[1:]], env=ENV)

    def end() -> None:
        process.kill()
        process.wait()

    stack.callback(end)
    check = f"import socket; socket.create_connection(('{SERVER}', 8080), 1)"
    for _ in range(100):
        probe = ["ip", "netns", "exec", "d4w-b", sys.executable, "-c", check]
        if subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0:
            return process
        time.sleep(0.2)
    raise SystemExit("the server in the namespace did not start")


def iperf(streams: int) -> float:
    """Bytes a second from the server's namespace to the client's."""
    listener = subprocess.Popen(
        ["ip", "netns", "exec", "d4w-a", "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(0.5)
        command = ["ip", "netns", "exec", "d4w-b", "iperf3", "-c", SERVER, "-R", "-J", "-t", "4", "-P", str(streams)]
        output = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
        return float(json.loads(output)["end"]["sum_received"]["bits_per_second"]) / 8
    finally:
        listener.kill()
        listener.wait()


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def stage(job: Job, prefix: list[str]) -> News:
    """Run a staging as the agent does; its last news."""
    command = [*prefix, *STAGE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV, text=True) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{job.to_json()}\n")
        process.stdin.flush()
        return News.model_validate_json(process.stdout.readlines()[-1])


# Kills.


def kills(root: Path, options: Any) -> None:
    """Kill a staging at random bytes until it has been killed often enough, then let it end."""
    print_kills(*kill_often(root, options.kills, size=128 << 20, pace=80e6, seed=7))


def kill_often(root: Path, count: int, *, size: int, pace: float, seed: int) -> tuple[list[dict[str, int]], bool]:
    """Kill one staging of one file `count` times with SIGKILL; return what each kill cost, and if the file is right.

    `lost` of a kill: bytes that the server sent in that life of the process, less those by which the part grew.
    """
    source = root / "source"
    source.mkdir(parents=True)
    write_big(source / "model.safetensors", size, seed)
    (source / "config.json").write_text("{}")
    write_sums(source)
    files = FileServer(source)
    files.pace = pace
    server = Server(files.app)
    target = root / "copy"
    job = Job(weights=WeightsPlan(source=WeightsSource.HTTP, path=str(target), origin=server.url, streams=1))
    dice = random.Random(seed)
    targets = sorted(dice.randrange(1, size) for _ in range(count))
    rows: list[dict[str, int]] = []
    try:
        for aim in targets:
            before, sent = part_size(target), files.sent
            process = subprocess.Popen(STAGE, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=ENV, text=True)
            assert process.stdin
            process.stdin.write(f"{job.to_json()}\n")
            process.stdin.flush()
            deadline = time.monotonic() + 60
            # The manifest's and the configuration's few bytes are sent anew each time.
            while before + files.sent - sent < aim and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.0005)
            ended = process.poll()
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdin.close()
            assert ended is None, "the staging ended before it was killed"
            time.sleep(0.3)  # the server notices
            after = part_size(target)
            rows.append({"at": aim, "before": before, "kept": after, "lost": files.sent - sent - (after - before)})
        news = stage(job, [])
        assert news.error is None, news.error
    finally:
        server.stop()
    digest = hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
    return rows, digest in (source / "SHA256SUMS").read_text()


def part_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("model.safetensors.*.part"))


def print_kills(rows: list[dict[str, int]], right: bool) -> None:
    print(f"{len(rows)} kills of one transfer; a chunk is {CHUNK_BYTES} bytes\n")
    print("| kill at byte | kept | lost | | kill at byte | kept | lost |\n|---|---|---|---|---|---|---|")
    half = (len(rows) + 1) // 2
    for left, other in zip(rows[:half], [*rows[half:], {}], strict=False):
        cells = [str(row.get(key, "")) for row in (left, other) for key in ("at", "kept", "lost")]
        print(f"| {' | '.join(cells[:3])} | | {' | '.join(cells[3:])} |")
    lost = [row["lost"] for row in rows]
    verdict = "right" if right else "WRONG"
    print(f"\nlost: median {statistics.median(lost):.0f}, most {max(lost)} bytes; the file is {verdict}")
    if not right or max(lost) > CHUNK_BYTES:
        sys.exit("a kill cost more than a chunk, or the file is wrong")


if __name__ == "__main__":
    main()
