"""Staging between members, compared with `iperf3` over the same link, between two network namespaces."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web
from weights_runs import ENV, GIB, once, rates, stage, write_big

from dsv4_runtime.agent import http
from dsv4_runtime.contract import PageCache, WeightsPlan, WeightsSource
from dsv4_runtime.weights.members import StagingJob, StagingReport, WeightsServer
from dsv4_runtime.weights.store import Store
from dsv4_testkit.weights_servers import TOKEN, Reporter, write_sums

SERVER, CLIENT = "10.77.0.1", "10.77.0.2"
SIDES = {
    "iperf3": "`iperf3`, bytes thrown away",
    "files": "`iperf3` into files, then `openssl dgst -sha256`, `sync`",
    str(PageCache.WARM): "staged through the page cache (`Warm`)",
    str(PageCache.UNIFIED): "staged past it (`Unified`)",
}
_PATIENCE = 600.0


def plan_for(folder: Path, streams: int, page_cache: PageCache = PageCache.WARM) -> WeightsPlan:
    origin = "http://192.0.2.1/none"
    return WeightsPlan(
        source=WeightsSource.HTTP, path=str(folder), origin=origin, streams=streams, page_cache=page_cache
    )


def serve(folder: Path) -> None:
    """Serve the weights as a member's agent does, in a separate process."""
    share = WeightsServer(plan_for(folder, 1))
    share.heard(StagingReport(stance="Complete"))  # type: ignore[arg-type]
    app = http.application(Reporter(), TOKEN)  # type: ignore[arg-type]
    share.add_to(app)
    web.run_app(app, host=SERVER, port=8080, print=None, access_log=None)


def members(root: Path, options: Any) -> None:
    for program in ("iperf3", "ip", "tc", "openssl"):
        if shutil.which(program) is None:
            print(f"member to member: skipped, {program} is not installed\n")
            return
    print("| link, Mbit/s | what | MB/s, median (range) | of `iperf3` | processor seconds for a GB: receiver, sender |")
    print("|---|---|---|---|---|", flush=True)
    for rate in map(int, options.rates.split(",")):
        found = once(f"members {rate}", options, lambda rate=rate: compare_links(root, options, rate))  # type: ignore[misc]
        for what, words in SIDES.items():
            speeds = [row["speed"] for row in found[what]]
            ratio = statistics.median(speeds) / statistics.median(row["speed"] for row in found["iperf3"])
            seconds = [statistics.median(row[side] for row in found[what]) for side in ("receiver", "sender")]
            shown = ", ".join(f"{value:.2f}" for value in seconds)
            print(f"| {rate or 'not limited'} | {words} | {rates(speeds)} | {ratio:.2f} | {shown} |", flush=True)
    hashing = f"{found['sha256'] / 1e6:.0f} MB/s"
    print(f"\nmemory of the serving process: {found['memory'] >> 20} MiB; SHA-256 on one core: {hashing}")
    print("Both sides share the cores of this machine. The processor seconds do not contain those of the kernel's own")
    print("threads, which write pages to the disk.\n", flush=True)


def compare_links(root: Path, options: Any, rate: int) -> dict[str, Any]:
    source = root / "source"
    if not source.exists():
        for number in range(options.streams):
            write_big(source / f"{number}.safetensors", int(options.size * GIB / options.streams), number)
        (source / "config.json").write_text("{}")
        write_sums(source)
        marked(source)
    size = sum(path.stat().st_size for path in source.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    found: dict[str, Any] = {what: [] for what in SIDES}
    found["sha256"] = sha256_rate()
    with ExitStack() as stack:
        link(stack, rate)
        server = psutil.Process(start(stack, ["a", sys.executable, __file__, str(source)]).pid)
        for _ in range(options.runs):
            found["iperf3"].append(iperf(options.streams))
            found["files"].append(iperf_into_files(source, root / "files", options.streams))
            for policy in (PageCache.WARM, PageCache.UNIFIED):
                plan = plan_for(root / "copy", options.streams, policy)
                found[str(policy)].append(staged(plan, size, server))
        found["memory"] = server.memory_info().rss
    return found


def staged(plan: WeightsPlan, size: int, server: psutil.Process) -> dict[str, float]:
    """Run one staging of `size` bytes from the process `server`; return speed and processor seconds per GB."""
    job = StagingJob(weights=plan, rank=1, members={0: f"http://{SERVER}:8080"}, token=TOKEN)
    before, sent = os.times(), sum(server.cpu_times()[:2])
    news = stage(job, ["ip", "netns", "exec", "d4w-b"])
    between = os.times()
    assert news.error is None, news.error
    assert news.fetched == size
    # A second staging without work measures the start of the process, which is not part of the transfer.
    assert stage(job, ["ip", "netns", "exec", "d4w-b"]).fetched == 0
    after = os.times()
    removed(Path(plan.path))
    return {
        # The process reports the duration of the staging, without the start of Python.
        "speed": size / float((news.stage or "").split(" in ")[1].split(" ")[0]),
        "receiver": (used(before, between) - used(between, after)) / (size / 1e9),
        "sender": (sum(server.cpu_times()[:2]) - sent) / (size / 1e9),
    }


def sha256_rate() -> float:
    block, begun = bytes(1 << 20), time.monotonic()
    digest = hashlib.sha256()
    for _ in range(500):
        digest.update(block)
    return 500 * len(block) / (time.monotonic() - begun)


def marked(folder: Path) -> None:
    """Write manifest and marker as after a staging."""
    from dsv4_runtime.weights.checkpoint import CheckpointManifest, ManifestFile

    plan = plan_for(folder, 1)
    store = Store(folder, plan.identity)
    rows = [line.split() for line in (folder / "SHA256SUMS").read_text().splitlines()]
    files = [ManifestFile(name=name, size=(folder / name).stat().st_size, sha256=digest) for digest, name in rows]
    store.note_manifest(CheckpointManifest(identity=plan.identity, files=tuple(files)))
    for file in files:
        store.note(file, file.sha256 or "")


def link(stack: ExitStack, rate: int) -> None:
    """Create two namespaces and a pair of interfaces between them, of `rate` Mbit/s."""
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


def iperf(streams: int) -> dict[str, float]:
    """Measure the transfer from the server's namespace to the client's, which discards the bytes."""
    listener = subprocess.Popen(
        ["ip", "netns", "exec", "d4w-a", "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(0.5)
        command = ["ip", "netns", "exec", "d4w-b", "iperf3", "-c", SERVER, "-R", "-J", "-t", "4", "-P", str(streams)]
        output = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
        end = json.loads(output)["end"]
        size, use = end["sum_received"]["bytes"] / 1e9, end["cpu_utilization_percent"]
        seconds = end["sum_received"]["seconds"]
        return {
            "speed": end["sum_received"]["bits_per_second"] / 8,
            "receiver": use["host_total"] / 100 * seconds / size,
            "sender": use["remote_total"] / 100 * seconds / size,
        }
    finally:
        listener.kill()
        listener.wait()


def iperf_into_files(source: Path, target: Path, streams: int) -> dict[str, float]:
    """Move files like a script: each by its own `iperf3` into a file, followed by SHA-256 and a flush to the disk."""
    target.mkdir()
    enter = ["ip", "netns", "exec"]
    receive = "iperf3 -s -1 -p $((5301 + $0)) -F $0 && openssl dgst -sha256 $0 && sync $0"
    receivers = [
        subprocess.Popen(
            [*enter, "d4w-b", "sh", "-c", receive, str(number)],
            cwd=target,
            # Its programs end with it, even if one of them hangs.
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(streams)
    ]
    senders: list[subprocess.Popen[bytes]] = []
    try:
        time.sleep(0.5)
        begun, before = time.monotonic(), os.times()
        for number in range(streams):
            file = source / f"{number}.safetensors"
            command = [*enter, "d4w-a", "iperf3", "-c", CLIENT, "-p", str(5301 + number), "-F", str(file)]
            command += ["-n", str(file.stat().st_size), "-J"]
            senders.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        for sender in senders:
            assert sender.wait(_PATIENCE) == 0
        between = os.times()
        for receiver in receivers:
            assert receiver.wait(_PATIENCE) == 0
        took, after = time.monotonic() - begun, os.times()
    finally:
        for receiver in receivers:
            with suppress(ProcessLookupError):
                os.killpg(receiver.pid, signal.SIGKILL)
        for process in (*senders, *receivers):
            process.kill()
            process.wait()
    # A receiver ends with the sender's last message, which can overtake the last bytes of the file.
    size = sum(path.stat().st_size for path in target.iterdir())
    removed(target)
    sent, got = used(before, between), used(between, after)
    return {"speed": size / took, "receiver": got / (size / 1e9), "sender": sent / (size / 1e9)}


def removed(folder: Path) -> None:
    """Remove `folder` and wait for the disk, so that later measurements are not affected."""
    shutil.rmtree(folder)
    os.sync()


def used(before: os.times_result, after: os.times_result) -> float:
    """Return the processor seconds of the children that ended between two calls of `os.times`."""
    return after.children_user + after.children_system - before.children_user - before.children_system


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
