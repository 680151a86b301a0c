"""The links of the suite are really cut, lossy and slow: a fault without effect would prove nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

# Runs in a separate process, which moves into a network of its own.
SCRIPT = """
import json, os, socket, subprocess, sys, threading, time
from dsv4_operator.backends.local import network
from dsv4_testkit.faults import links

ECHO = '''
import socket, threading
listener = socket.create_server(("", 9000))
while True:
    peer, _ = listener.accept()
    def serve(peer=peer):
        while data := peer.recv(1 << 20):
            peer.sendall(data)
    threading.Thread(target=serve, daemon=True).start()
'''
network.enter_private_network()
member = subprocess.Popen(["unshare", "--net", sys.executable, "-c", ECHO])
try:
    while not network.in_own_network(member.pid):
        time.sleep(0.05)
    network.plug_in(member.pid, 1, 1)
    deadline = time.monotonic() + 60
    while True:
        try:
            client = socket.create_connection((network.address(1), 9000), timeout=30)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def trip(size=1):
        begun, got = time.monotonic(), 0
        client.sendall(b"x" * size)
        while got < size:
            got += len(client.recv(1 << 20))
        return time.monotonic() - begun

    def carrier():
        command = ["nsenter", f"--net=/proc/{member.pid}/ns/net", "ip", "-br", "link", "show", network.INTERFACE]
        return "LOWER_UP" in subprocess.run(command, capture_output=True, text=True, check=True).stdout

    me, port, found = os.getpid(), "m1.1", {}
    trip()
    found["plain"] = min(trip() for _ in range(5))
    links.lose(me, port)
    threading.Timer(2.0, links.restore, (me, port)).start()
    found["carrier while lost"] = carrier()
    found["lost"] = trip()
    ended, deadline = links.lose_for(me, port, 1.0), time.monotonic() + 10
    while (lost := trip()) < 0.5 and time.monotonic() < deadline:
        pass
    ended()
    found["lost for 1 s"] = lost
    slow = links.SlowLink(me, port, 0.3)
    trip()
    found["slow"] = min(trip() for _ in range(5))
    found["slow, 300 kB"] = trip(300_000)
    slow.end()
    trip()
    found["after"] = min(trip() for _ in range(5))
    links.cut(me, port)
    found["carrier after the cut"] = carrier()
    client.settimeout(2.0)
    try:
        trip()
        found["cut"] = False
    except TimeoutError:
        found["cut"] = True
    print(json.dumps(found))
finally:
    member.kill()
    member.wait(10)
"""


def test_links_have_the_configured_loss_delay_and_cut():
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={"PYTHONPATH": path, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["plain"] < 0.1
    assert found["carrier while lost"]
    # No packet arrived in either direction until the loss ended.
    assert found["lost"] >= 1.8
    assert found["lost for 1 s"] >= 0.5
    # Each direction has half of the delay, and large segments arrive completely.
    assert 0.29 <= found["slow"] < 0.6
    assert 0.29 <= found["slow, 300 kB"] < 3.0
    assert found["after"] < 0.1
    assert not found["carrier after the cut"]
    assert found["cut"]
