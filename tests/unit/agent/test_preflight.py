from __future__ import annotations

import socket
from typing import Any

import pytest

from dsv4_runtime.agent.preflight import PreflightError, check_ports, check_resources, wait_for_address
from dsv4_runtime.contract import Cause, Expectations


async def test_an_address_that_is_nowhere(make_plan: Any) -> None:
    await wait_for_address("127.0.0.1", 0.1)
    with pytest.raises(PreflightError, match=r"no interface has the member's address 192\.0\.2\.1"):
        await wait_for_address("192.0.2.1", 0.1)


def test_a_port_that_is_taken(make_plan: Any) -> None:
    check_ports(make_plan(), 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 18000))
        taken.listen()
        with pytest.raises(PreflightError, match=r"the api port 18000 of 127\.0\.0\.1 cannot be used") as caught:
            check_ports(make_plan(), 0)
    assert caught.value.cause is Cause.PORT_CONFLICT


@pytest.mark.parametrize(
    ("field", "words"), [("memory_bytes", "GiB of memory are free"), ("shm_bytes", "/dev/shm has")]
)
def test_too_little_of_something(make_plan: Any, field: str, words: str) -> None:
    want = {"world_size": 2, "memory_bytes": 0, "shm_bytes": 0, "ready_seconds": 1, field: 2**60}
    with pytest.raises(PreflightError, match=words):
        check_resources(make_plan(expectations=Expectations(**want)))
