"""Program of test_proof in a separate process, whose network it changes: two namespaces and the network between them.

Argument: one JSON object. Output: a JSON list of the results of both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from dsv4_operator.backends.local import network


def ip(words: str, inside: int | None = None) -> None:
    prefix = ["nsenter", f"--net=/proc/{inside}/ns/net"] if inside else []
    subprocess.run([*prefix, "ip", *words.split()], check=True, timeout=120)


def namespace() -> int:
    process = subprocess.Popen(["unshare", "--net", "--kill-child", "sleep", "1000"])
    while not network.in_own_network(process.pid):
        time.sleep(0.01)
    holders.append(process)
    ip("link set lo up", process.pid)
    return process.pid


holders: list[subprocess.Popen[bytes]] = []


def main() -> None:
    how = json.loads(sys.argv[1])
    try:
        network.enter_private_network()
    except network.NoNamespacesError as error:
        sys.exit(f"not here: {error}")
    try:
        print(json.dumps(both(how)))
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def both(how: dict[str, object]) -> list[object]:
    routed, mtu, between = bool(how.get("routed")), how["mtu"], how["between"]
    addresses = ["10.88.1.10", "10.88.2.11" if routed else "10.88.1.11"]
    # This namespace is the switch or router between the members.
    if not routed:
        ip("link add switch type bridge")
        ip("link set switch up")
    else:
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    members = [namespace(), namespace()]
    for rank, pid in enumerate(members):
        ip(f"link add port{rank} type veth peer name fabric0 netns {pid}")
        # The members' ends keep the large MTU; only the network between them has the small one.
        ip(f"link set port{rank} mtu {between} up")
        ip(f"addr add {addresses[rank]}/24 dev fabric0", pid)
        ip(f"link set fabric0 mtu {mtu} up", pid)
        if routed:
            ip(f"addr add 10.88.{rank + 1}.1/24 dev port{rank}")
            ip(f"route add 10.88.{2 - rank}.0/24 via 10.88.{rank + 1}.1", pid)
        else:
            ip(f"link set port{rank} master switch")
    block = how.get("block")
    for rank in (0, 1):
        if block in (rank, 2):
            # Packets from this member, including its replies, are dropped on the way through. The protocol is given by
            # number, because a minimal system has no /etc/protocols.
            protocol = f"ipproto {how['protocol']}" if how.get("protocol") else ""
            ip(f"rule add iif port{rank} {protocol} blackhole")
    if how.get("doctor"):
        commands = [
            [
                *(sys.executable, "-c", "from dsv4_operator.cli.main import main; main()"),
                *("doctor", "--peer", addresses[1 - rank], "--wait", "10s", "-o", "json"),
            ]
            for rank in (0, 1)
        ]
    else:
        commands = [
            [sys.executable, str(how["side"]), str(rank), json.dumps(how | {"addresses": addresses})] for rank in (0, 1)
        ]
    sides = [
        subprocess.Popen(
            ["nsenter", f"--net=/proc/{pid}/ns/net", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for pid, command in zip(members, commands, strict=True)
    ]
    found = []
    for side in sides:
        out, err = side.communicate(timeout=400)
        try:
            found.append({**json.loads(out), "code": side.returncode})
        except ValueError:
            raise SystemExit(f"a side ended with {side.returncode}: {out}{err}") from None
    return found


if __name__ == "__main__":
    main()
