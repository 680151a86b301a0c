"""A watch and a request whose API server is gone without a word: real links, which drop every frame.

Left out of a machine that does not allow network namespaces, as the engine ring is.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SERVER = """
import socket, threading
HEAD = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
EVENT = b'{"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": "1"}}}\\n'
LIST = b'{"metadata": {"resourceVersion": "1"}, "items": []}'

def serve(one):
    while asked := one.recv(65536):
        body = EVENT if b"watch=1" in asked else LIST
        end = b"" if body is EVENT else b"0\\r\\n\\r\\n"
        one.sendall(HEAD + b"%x\\r\\n%s\\r\\n" % (len(body), body) + end)

listener = socket.create_server(("", 9000))
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""

SCRIPT = (
    f"SERVER = {SERVER!r}\n"
    + """
import asyncio, json, os, subprocess, sys, time
from dsv4_operator.backends.local import network
from dsv4_operator.kube import PODS, Access, Client, Unavailable, client
from dsv4_testkit.faults import links

client._LOST_SECONDS = 3.0

async def lost():
    async with Client(Access(f"http://{network.address(1)}:9000")) as kube:
        async with asyncio.timeout(60):
            while True:
                try:
                    await kube.list(PODS)
                    break
                except Unavailable:
                    await asyncio.sleep(0.1)
        watch = kube.watch(PODS, resource_version="0")
        await anext(watch)
        links.lose(os.getpid(), "m1.1")
        begun = time.monotonic()

        async def until_broken(work):
            try:
                await work
            except Unavailable as error:
                return time.monotonic() - begun, str(error)
            return None

        return await asyncio.gather(until_broken(anext(watch)), until_broken(kube.list(PODS)))

try:
    network.enter_private_network()
except network.NoNamespacesError as error:
    sys.exit(f"not here: {error}")
server = subprocess.Popen(["unshare", "--net", sys.executable, "-c", SERVER])
try:
    while not network.in_own_network(server.pid):
        time.sleep(0.05)
    network.plug_in(server.pid, 1, 1)
    print(json.dumps(asyncio.run(lost())))
finally:
    server.kill()
    server.wait(60)
"""
)


def test_connections_to_a_lost_server_break_soon() -> None:
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONPATH": path, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.stderr.startswith("not here"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    for seconds, _ in json.loads(done.stdout):
        # Their own limits are 90 and 30 s.
        assert 1.0 < seconds < 25.0
