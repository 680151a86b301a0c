"""The private network, created for real. Skipped on machines that do not allow it, as is the engine ring."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from dsv4_operator.api import parse
from dsv4_operator.backends.local import network
from dsv4_operator.backends.local.state import DeploymentState
from dsv4_operator.cli import processes
from dsv4_testkit.waiting import free_ports

# Upper bound for slow machines.
SECONDS = 90.0

# Runs in a process of its own, because it changes its own network. A member's namespace outlives its process while it
# is referenced, for example by a socket with unsent data; here by an open file.
SCRIPT = """
import os, subprocess, sys, time
from dsv4_operator.backends.local import network
try:
    network.enter_private_network()
except network.NoNamespacesError as error:
    sys.exit(f"not here: {error}")

def member(incarnation):
    process = subprocess.Popen(["unshare", "--net", "sleep", "600"])
    while not network.in_own_network(process.pid):
        time.sleep(0.01)
    network.plug_in(process.pid, incarnation, 0)
    return process

def answers():
    return subprocess.run(["nsenter", "--net=/proc/self/ns/net", "bash", "-c",
        f"exec 3<>/dev/tcp/{network.address(0)}/9"], capture_output=True, text=True, timeout=120).stderr

first = member(1)
held = os.open(f"/proc/{first.pid}/ns/net", os.O_RDONLY)
print("first:", "refused" in answers())
first.kill()
first.wait()
print("dead but held:", "refused" in answers())
network.unplug(1, 0)
network.unplug(1, 0)
print("unplugged:", "refused" in answers())
second = member(2)
print("second:", "refused" in answers())
second.kill()
second.wait()
"""


# A loop is killed after each command of `plug_in`, and the next one plugs the member in.
KILLED_LOOP = """
import os, signal, subprocess, sys, time
from dsv4_operator.backends.local import network
try:
    network.enter_private_network()
except network.NoNamespacesError as error:
    sys.exit(f"not here: {error}")

ip, run = network._ip, []

def plug_in_until(pid, incarnation, commands):
    done = []
    def killed(arguments, prefix=()):
        output = ip(arguments, prefix)
        done.append(arguments)
        if len(done) == commands:
            os.kill(os.getpid(), signal.SIGKILL)
        return output
    loop = os.fork()
    if loop == 0:
        network._ip = killed
        network.plug_in(pid, incarnation, 0)
        os._exit(0)
    return os.waitpid(loop, 0)[1] == signal.SIGKILL

def interface(pid):
    shown = ip("-o link show eth0", ["nsenter", f"--net=/proc/{pid}/ns/net"])
    return shown.split(":")[0]

commands = 0
stopped = True
while stopped:
    commands += 1
    # Without this process' pipes, which it would keep open if this process fails.
    member = subprocess.Popen(["unshare", "--net", "sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not network.in_own_network(member.pid):
        time.sleep(0.01)
    stopped = plug_in_until(member.pid, commands, commands)
    network.plug_in(member.pid, commands, 0)
    said = subprocess.run(["bash", "-c", f"exec 3<>/dev/tcp/{network.address(0)}/9"], capture_output=True, text=True)
    before = interface(member.pid)
    network.plug_in(member.pid, commands, 0)
    print("refused" in said.stderr, before == interface(member.pid))
    member.kill()
    member.wait()
    network.unplug(commands, 0)
"""


def run_script(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    if done.stderr.startswith("not here"):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_address_of_a_fenced_member_does_not_answer() -> None:
    # A refused connection proves that the address exists; without the network there is no response.
    assert run_script(SCRIPT) == ["first: True", "dead but held: True", "unplugged: False", "second: True"]


def test_a_member_gets_its_network_after_the_loop_was_killed() -> None:
    """It keeps its interface if that is complete."""
    lines = run_script(KILLED_LOOP)
    assert len(lines) > 5
    assert set(lines) == {"True True"}


def test_weights_are_fetched_over_the_network_of_the_machine() -> None:
    """By a real supervisor, loop and agent: the private network of members leads nowhere else."""
    try:
        network.check_namespaces()
    except network.NoNamespacesError as error:
        pytest.skip(str(error))
    asked = threading.Event()

    class Source(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    ports = dict(zip(("api", "dashboard", "gcs", "agent"), free_ports(4), strict=True))
    # tmp_path is not usable: its names are longer than Ray's sockets allow.
    with (
        tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as root,
        ThreadingHTTPServer(("127.0.0.1", 0), Source) as server,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spec = {
            "model": {"variant": "Nano", "source": {"http": {"url": f"http://127.0.0.1:{server.server_port}/"}}},
            "topology": {"hardware": "CPU"},
            "network": {"ports": ports},
            "engine": {"maxModelLen": 1024, "kvCacheMemory": "64Mi"},
        }
        kind = {"apiVersion": "dsv4.dev/v1beta1", "kind": "DSV4Deployment", "metadata": {"name": "n"}}
        state = DeploymentState(Path(root), "n")
        state.prepare()
        state.save_manifest(parse({**kind, "spec": spec}))
        process = processes.start_loop(state, processes.loop_command(state, attached=False))
        try:
            assert asked.wait(SECONDS), state.log.read_text()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)
            processes.stop_processes(state)
            server.shutdown()


def test_members_have_different_addresses() -> None:
    # 32 groups of 16 members, the maximum of a specification, in one network with the bridge.
    found = [ip_address(network.address(place)) for place in range(32 * 16)]
    assert str(found[0]) == "10.88.0.10"
    assert len(set(found)) == 32 * 16
    assert all(one in ip_network("10.88.0.0/20") for one in found)


def test_a_process_whose_name_is_no_text_has_its_number() -> None:
    script = "open('/proc/self/comm', 'wb').write(b'name \\xc3'); print(flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid in network.outside_ids(process.pid).values()
    finally:
        process.kill()
        process.communicate()
