"""How fast weights move, and what a kill costs: `python benchmarks/weights.py`, as root for the network namespaces.

Prefetch against `dd` of the same file with a cold page cache; staging from member to member against `iperf3` over the
same link between two network namespaces; 50 kills of a staging at random bytes. Prints tables with the machine, each
row when it is measured. With `--json FILE` a run that was cut off goes on after the rows that it had finished.
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
from collections.abc import Callable
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
    parser.add_argument(
        "--json", type=Path, help="figures of finished rows: written after each, and not measured again"
    )
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


def once(name: str, options: Any, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` returns, or what it returned for this name in an earlier run with the same `--json`."""
    known: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    if name not in known:
        known[name] = measure()
        if options.json:
            options.json.write_text(json.dumps(known, indent=1))
    figures: dict[str, Any] = known[name]
    return figures


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def rates(values: list[float]) -> str:
    return f"{statistics.median(values) / 1e6:.0f} ({min(values) / 1e6:.0f} to {max(values) / 1e6:.0f})"


# Prefetch.


def prefetch(root: Path, options: Any) -> None:
    print("| cold read of the same files | MB/s, median (range) | ratio |\n|---|---|---|")
    found = once("prefetch", options, lambda: compare_reads(root, options))
    ratio = statistics.median(found["prefetch"]) / statistics.median(found["dd"])
    print(f"| `dd bs=8M` | {rates(found['dd'])} | 1 |")
    print(f"| prefetch | {rates(found['prefetch'])} | {ratio:.2f} |\n", flush=True)


def compare_reads(root: Path, options: Any) -> dict[str, Any]:
    files = [root / f"{number}.safetensors" for number in range(2)]
    for number, file in enumerate(files):
        write_big(file, int(options.size * GIB / 2), number)
    size = sum(file.stat().st_size for file in files)

    def dd() -> None:
        for file in files:
            subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=8M"], check=True, stderr=subprocess.DEVNULL)

    def ours() -> None:
        assert cache.warm(files, size, lambda *_: None) == size

    found: dict[str, list[float]] = {"dd": [], "prefetch": []}
    sides = [("dd", dd), ("prefetch", ours)]
    for run in range(options.runs):
        # A cache below this machine, of a host or a disk array, may favour whoever is second.
        for name, read in sides if run % 2 else reversed(sides):
            cache.drop(files)
            begun = time.monotonic()
            read()
            found[name].append(size / (time.monotonic() - begun))
    for file in files:
        file.unlink()
    return found


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
    print(
        f"| link, Mbit/s | `iperf3 -P {options.streams}` MB/s, median (range) | staged MB/s, median (range) | ratio |"
    )
    print("|---|---|---|---|", flush=True)
    for rate in map(int, options.rates.split(",")):
        found = once(f"members {rate}", options, lambda rate=rate: compare_links(root, options, rate))  # type: ignore[misc]
        ratio = statistics.median(found["staged"]) / statistics.median(found["iperf3"])
        print(
            f"| {rate or 'not limited'} | {rates(found['iperf3'])} | {rates(found['staged'])} | {ratio:.2f} |",
            flush=True,
        )
    print(
        f"\nthe process that served had {found['memory'] >> 20} MiB; one core computes {found['sha256'] / 1e6:.0f} MB/s"
    )
    print("of SHA-256, and both sides share this machine's cores\n", flush=True)


def compare_links(root: Path, options: Any, rate: int) -> dict[str, Any]:
    source = root / "source"
    if not source.exists():
        for number in range(options.streams):
            write_big(source / f"{number}.safetensors", int(options.size * GIB / options.streams), number)
        (source / "config.json").write_text("{}")
        write_sums(source)
        marked(source)
    size = sum(path.stat().st_size for path in source.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    found: dict[str, Any] = {"iperf3": [], "staged": [], "sha256": sha256_rate()}
    with ExitStack() as stack:
        link(stack, rate)
        server = start(stack, ["a", sys.executable, __file__, "--serve", str(source)])
        for run in range(options.runs):
            found["iperf3"].append(iperf(options.streams))
            target = root / f"copy-{run}"
            job = Job(
                weights=plan_for(target, options.streams), rank=1, members={0: f"http://{SERVER}:8080"}, token=TOKEN
            )
            news = stage(job, ["ip", "netns", "exec", "d4w-b"])
            assert news.error is None, news.error
            assert news.fetched == size
            # The process says how long it staged; Python's start is not the network's.
            found["staged"].append(size / float((news.stage or "").split(" in ")[1].split(" ")[0]))
            shutil.rmtree(target)
        found["memory"] = psutil.Process(server.pid).memory_info().rss
    return found


def sha256_rate() -> float:
    block, begun = bytes(1 << 20), time.monotonic()
    digest = hashlib.sha256()
    for _ in range(500):
        digest.update(block)
    return 500 * len(block) / (time.monotonic() - begun)


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
    print(f"{options.kills} kills of one transfer; a chunk is {CHUNK_BYTES} bytes\n")
    print("| killed at byte | kept | lost |\n|---|---|---|")

    printed = []

    def told(row: dict[str, int]) -> None:
        printed.append(row)
        print(f"| {row['at']} | {row['kept']} | {row['lost']} |", flush=True)

    def measure() -> dict[str, Any]:
        rows, right = kill_often(root, options.kills, size=128 << 20, pace=80e6, seed=7, told=told)
        return {"rows": rows, "right": right}

    found = once("kills", options, measure)
    for row in found["rows"][len(printed) :]:
        told(row)
    lost = [row["lost"] for row in found["rows"]]
    verdict = "right" if found["right"] else "WRONG"
    print(
        f"\n{len(lost)} kills: median {statistics.median(lost):.0f}, most {max(lost)} bytes lost; the file is {verdict}"
    )
    if not found["right"] or max(lost) > CHUNK_BYTES:
        sys.exit("a kill cost more than a chunk, or the file is wrong")


def kill_often(
    root: Path, count: int, *, size: int, pace: float, seed: int, told: Callable[[dict[str, int]], None]
) -> tuple[list[dict[str, int]], bool]:
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
            told(rows[-1])
        news = stage(job, [])
        assert news.error is None, news.error
    finally:
        server.stop()
    digest = hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
    return rows, digest in (source / "SHA256SUMS").read_text()


def part_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("model.safetensors.*.part"))


if __name__ == "__main__":
    main()
