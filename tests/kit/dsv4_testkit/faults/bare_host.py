"""The peer's machines: two members in namespaces with Ray and vLLM in restart loops, and no agent.

    python bare_host.py host DIRECTORY MODEL PORT
    python bare_host.py member DIRECTORY MODEL RANK

The host restarts a member after its exit, as a container runtime with `restart: always` does. The member is process 1
of its namespaces and restarts Ray's node and, on rank 0, vLLM's server in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from dsv4_operator.backends.local import network
from dsv4_operator.backends.local.gateway import Publisher, bind_loopback
from dsv4_operator.backends.local.network import children

_SHM_BYTES = 512 * 2**20
_PAUSE_SECONDS = 1.0
_GCS, _API = 6379, 8000
_MEMBERS = 2


def environment(rank: int) -> dict[str, str]:
    """Return the variables of vLLM and Ray for the nano model on a CPU, as set by a user without dsv4."""
    more = {"RAY_ADDRESS": f"{network.address(0)}:{_GCS}"} if rank == 0 else {}
    return {
        **os.environ,
        "DSV4_DEV_PLATFORM": "1",
        "GLOO_SOCKET_IFNAME": network.INTERFACE,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONDONTWRITEBYTECODE": "",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TRANSFORMERS_OFFLINE": "1",
        "TRITON_INTERPRET": "1",
        "VLLM_HOST_IP": network.address(rank),
        "VLLM_NO_USAGE_STATS": "1",
        **more,
    }


def commands(directory: Path, model: str, rank: int) -> dict[str, list[str]]:
    """Return the programs of a member, each run in a loop; the flags equal dsv4's plan for the same deployment."""
    ray = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--block",
        f"--node-ip-address={network.address(rank)}",
    ]
    ray += ["--num-gpus=1", "--num-cpus=1", "--object-store-memory=80000000", f"--temp-dir={directory}/r{rank}"]
    ray += ["--disable-usage-stats", "--include-log-monitor=false"]
    if rank:
        return {"ray": [*ray, f"--address={network.address(0)}:{_GCS}"]}
    vllm = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--served-model-name=nano"]
    vllm += [f"--host={network.address(0)}", f"--port={_API}", "--tensor-parallel-size=2"]
    vllm += ["--distributed-executor-backend=ray", "--block-size=256", "--max-model-len=1024", "--max-num-seqs=4"]
    vllm += ["--max-num-batched-tokens=512", "--kv-cache-memory-bytes=536870912", "--enforce-eager"]
    vllm += ["--no-enable-prefix-caching"]
    return {"ray": [*ray, "--head", f"--port={_GCS}", "--include-dashboard=false"], "vllm": vllm}


async def host(directory: Path, model: str, port: int) -> None:
    """Start the members and restart them until this process is killed; they end with it."""
    listener = bind_loopback({"api": port})["api"]
    network.enter_private_network()
    publisher = Publisher(network.address(0), _API)
    await publisher.start(listener)
    await asyncio.gather(*(_keep_member(directory, model, rank) for rank in range(_MEMBERS)))


async def _keep_member(directory: Path, model: str, rank: int) -> None:
    for life in range(1, 10**6):
        words = [sys.executable, __file__, "member", str(directory), model, str(rank)]
        with (directory / f"m{rank}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *network.member_command(words, _SHM_BYTES),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: network.die_with_parent(signal.SIGKILL),
            )
        # Namespaces are created by another process, without an event for it.
        while not (network.in_own_network(process.pid) and children(process.pid)):
            await asyncio.sleep(0.01)
        network.plug_in(process.pid, life, rank)
        entry = {"member": process.pid, "init": children(process.pid)[0], "port": f"m{life}.{rank}"}
        _write(directory / f"m{rank}.json", json.dumps(entry))
        code = await process.wait()
        _record(directory, f"member {rank}", code)
        network.unplug(life, rank)
        await asyncio.sleep(_PAUSE_SECONDS)


async def member(directory: Path, model: str, rank: int) -> None:
    """Run as process 1: keep the programs running and reap orphaned processes."""
    mine: set[int] = set()
    loops = [
        _keep_program(directory, rank, name, words, mine) for name, words in commands(directory, model, rank).items()
    ]
    await asyncio.gather(*loops, _reap(mine))


async def _keep_program(directory: Path, rank: int, name: str, words: list[str], mine: set[int]) -> None:
    while not _has_address(rank):
        await asyncio.sleep(0.05)
    while True:
        with (directory / f"{name}{rank}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *words,
                env=environment(rank),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        mine.add(process.pid)
        code = await process.wait()
        mine.discard(process.pid)
        _record(directory, f"{name} {rank}", code)
        await asyncio.sleep(_PAUSE_SECONDS)


def _has_address(rank: int) -> bool:
    """Return whether the host has assigned an interface to this member."""
    return (
        network.INTERFACE in Path("/proc/net/dev").read_text()
        and network.address(rank) in Path("/proc/net/fib_trie").read_text()
    )


async def _reap(mine: set[int]) -> None:
    while True:
        await asyncio.sleep(1.0)
        for pid in children(os.getpid()):
            if pid not in mine:
                _collect(pid)


def _collect(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _record(directory: Path, what: str, code: int) -> None:
    with (directory / "exits").open("a") as file:
        file.write(json.dumps([time.time(), what, code]) + "\n")


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


if __name__ == "__main__":
    if sys.argv[1] == "host":
        network.die_with_parent(signal.SIGKILL)
        asyncio.run(host(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
    else:
        asyncio.run(member(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
