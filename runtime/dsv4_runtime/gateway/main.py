"""Process `dsv4-gateway`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import uvloop

from dsv4_runtime.contract.gateway import GatewaySettings
from dsv4_runtime.gateway.admission import ApiKeys, ApiKeysError
from dsv4_runtime.gateway.http_server import RESERVED_CONNECTIONS
from dsv4_runtime.gateway.metrics import open_traces
from dsv4_runtime.gateway.routing import RouteFile
from dsv4_runtime.gateway.server import MAX_CONNECTIONS, Gateway
from dsv4_runtime.util import LOG_DEPLOYMENT, LOG_FORMAT, TRACES
from dsv4_runtime.util.files import LOG_FORMATS, LOOP_DUE, format_logs, log_to

_log = logging.getLogger("dsv4.gateway")
_OWN_FILES = 64 + 2 * RESERVED_CONNECTIONS
"""Files besides client connections: logs, watches, libraries, connections beyond the limit."""
_LAST_PORT = 2**16 - 1


def main() -> None:
    """Serve until SIGTERM, then drain. Exit codes: 0 ended on request, 2 cannot start, with the reason in the log."""
    parser = argparse.ArgumentParser(prog="dsv4-gateway", description=main.__doc__)
    parser.add_argument("--settings", type=Path, required=True, help="JSON file with the limits (GatewaySettings)")
    parser.add_argument(
        "--route", type=Path, required=True, help="JSON file with agent, api, tokenKeyFile; re-read on change"
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fd", type=int, help="number of an inherited listening socket")
    where.add_argument("--listen", metavar="HOST:PORT")
    parser.add_argument("--own-fd", type=int, help="inherited listening socket of this process alone: probes, peers")
    parser.add_argument("--peer", action="append", default=[], metavar="URL", help="own socket of another process")
    parser.add_argument("--inherit-fd", type=int, help="inherited Unix socket for the connections of another process")
    parser.add_argument("--heir", metavar="NAME", help="abstract address of such a socket of another process")
    parser.add_argument(
        "--loop-fd", type=int, help="inherited memory file in which the control loop writes its due time"
    )
    parser.add_argument("--log", type=Path, help="log file, at most 64 MiB [default: standard error]")
    parser.add_argument(
        "--number", type=int, help="index among several gateways at one address, a label of its metrics"
    )
    parser.add_argument("--log-format", choices=LOG_FORMATS, help=f"of the log [default: ${LOG_FORMAT}, else text]")
    options = parser.parse_args()
    log_to(options.log)
    namespace, _, deployment = os.environ.get(LOG_DEPLOYMENT, "").rpartition("/")
    identity = {"namespace": namespace or None, "deployment": deployment or None}
    format_logs(options.log_format, lambda: identity)
    try:
        settings = GatewaySettings.model_validate_json(options.settings.read_bytes())
        routes = RouteFile(options.route)
        keys = ApiKeys(Path(settings.api_keys_file)) if settings.api_keys_file is not None else None
        listener = socket.socket(fileno=options.fd) if options.fd is not None else _bind(options.listen)
        own = socket.socket(fileno=options.own_fd) if options.own_fd is not None else None
        inherit = socket.socket(fileno=options.inherit_fd) if options.inherit_fd is not None else None
    except (OSError, ValueError, ApiKeysError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    connections = _max_connections(2 if inherit is None else 3)
    traces = open_traces(os.environ.get(TRACES), identity["namespace"], identity["deployment"])
    # Exclude imported modules from garbage collection: a full collection would otherwise take 5 ms.
    gc.collect()
    gc.freeze()
    gateway = partial(
        Gateway,
        settings,
        routes,
        keys,
        max_connections=connections,
        number=options.number,
        peers=options.peer,
        traces=traces,
        overdue=partial(_overdue, options.loop_fd) if options.loop_fd is not None else None,
    )
    heir = b"\0" + options.heir.encode() if options.heir is not None else None
    try:
        uvloop.run(_serve(gateway, listener, own, inherit, heir))
    finally:
        if traces is not None:
            traces.close()


def _overdue(descriptor: int) -> float:
    """Return the seconds for which a reconcile of the control loop has been overdue."""
    due: float = LOOP_DUE.unpack(os.pread(descriptor, LOOP_DUE.size, 0))[0]
    return max(0.0, time.monotonic() - due)


def _bind(where: str) -> socket.socket:
    """Return a listening socket at `HOST:PORT`; raises ValueError."""
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise ValueError(f"--listen {where!r} is not HOST:PORT; write for example 127.0.0.1:8000")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=4096, reuse_port=False)


def _max_connections(each: int) -> int:
    """Raise the file limit; return the maximum number of clients.

    Args:
        each: files for a client: its connection, one to vLLM, and a connection of another process.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = each * MAX_CONNECTIONS + _OWN_FILES
    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(1, (files - _OWN_FILES) // each)


async def _serve(
    gateway: Callable[[], Gateway],
    listener: socket.socket,
    own: socket.socket | None,
    inheritance: socket.socket | None,
    heir: bytes | None,
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await gateway().serve(listener, stop, own, inheritance=inheritance, heir=heir)
    _log.info("ended")


if __name__ == "__main__":
    main()
