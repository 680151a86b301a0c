"""Speed of moving weights, and cost of a kill: `python benchmarks/weights.py`, as root for the network namespaces.

Prefetch is compared with `dd` of the same file with a cold page cache. Staging between members is compared with
`iperf3` over the same link between two network namespaces, which discards the bytes, and with `iperf3` into files that
OpenSSL then hashes. A staging is killed 50 times at random bytes. Prints tables with the machine, each row when it is
measured. With `--json FILE` an interrupted run continues after its finished rows. On a virtual machine, use `--hold`
for most of its memory.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import mmap
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from weights_members import members
from weights_runs import ENV, GIB, STAGE, once, rates, stage, write_big

from dsv4_runtime.contract import PageCache, WeightsPlan, WeightsSource
from dsv4_runtime.weights import writer
from dsv4_runtime.weights.members import StagingJob
from dsv4_testkit.weights_servers import FileServer, Server, write_sums

CHUNK_BYTES = 1 << 20
"""Maximum cost of a kill for each stream."""

_PIECE = 2 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="disk to measure")
    parser.add_argument("--size", type=float, default=2.0, help="GiB of each run (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="alternating runs of each side (default: %(default)s)")
    parser.add_argument(
        "--rates", default="2500,10000,0", help="Mbit/s of the link, 0 for no limit (default: %(default)s)"
    )
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--only", choices=("prefetch", "members", "kills"))
    parser.add_argument("--hold", type=float, default=0.0, help="GiB of memory to keep from a virtual machine's host")
    parser.add_argument("--json", type=Path, help="file of figures; finished rows in it are not measured again")
    options = parser.parse_args()
    free = psutil.virtual_memory().available / GIB
    if not 0 <= options.hold < free:
        parser.error(f"--hold: {options.hold:g} GiB; {free:.1f} GiB are free, give 0 to less than that")
    now = datetime.datetime.now(datetime.UTC)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    print(f"{os.cpu_count()} × {cpu()}, {memory:.0f} GiB, Linux {platform.release()}, {now:%Y-%m-%d}\n", flush=True)
    held = hold(int(options.hold * GIB))
    with held, tempfile.TemporaryDirectory(prefix="d4-weights-", dir=options.directory) as root:
        for name, part in (("prefetch", prefetch), ("members", members), ("kills", kills)):
            if options.only in (None, name):
                part(Path(root) / name, options)


def hold(size: int) -> mmap.mmap:
    """Return a mapping with one page of every 2 MiB of `size` bytes of memory, which the machine then keeps.

    Hosts of virtual machines reclaim free memory in pieces of 2 MiB, and the return of a page costs as much as its
    reception, hash and write. On physical machines it has no effect.
    """
    held = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.madvise(mmap.MADV_NOHUGEPAGE)
    for start in range(0, size, mmap.PAGESIZE):
        held[start] = 1
    for start in range(0, size - _PIECE + 1, _PIECE):
        held.madvise(mmap.MADV_DONTNEED, start + mmap.PAGESIZE, _PIECE - mmap.PAGESIZE)
    return held


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


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
        assert writer.read_ahead(files, size, lambda *_: None) == size

    found: dict[str, list[float]] = {"dd": [], "prefetch": []}
    sides = [("dd", dd), ("prefetch", ours)]
    for run in range(options.runs):
        # A cache below this machine, of a host or a disk array, may favour the second reader.
        for name, read in sides if run % 2 else reversed(sides):
            writer.drop(files)
            begun = time.monotonic()
            read()
            found[name].append(size / (time.monotonic() - begun))
    for file in files:
        file.unlink()
    return found


# Kills.


def kills(root: Path, options: Any) -> None:
    """Kill a staging at random bytes for the given number of times, then let it finish."""
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
    root: Path,
    count: int,
    *,
    size: int,
    pace: float,
    seed: int,
    told: Callable[[dict[str, int]], None],
    page_cache: PageCache = PageCache.WARM,
) -> tuple[list[dict[str, int]], bool]:
    """Kill one staging of one file `count` times with SIGKILL; return the cost of each kill, and if the file is right.

    `lost`: bytes sent by the server in that life of the process, less the growth of the partial file.
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
    plan = WeightsPlan(source=WeightsSource.HTTP, path=str(target), origin=server.url, streams=1, page_cache=page_cache)
    job = StagingJob(weights=plan)
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
            # The few bytes of manifest and configuration are sent again each time.
            while before + files.sent - sent < aim and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.0005)
            ended = process.poll()
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdin.close()
            assert ended is None, "the staging ended before it was killed"
            time.sleep(0.3)  # time for the server to detect it
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
