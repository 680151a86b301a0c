"""Real processes: a gateway, two groups, and the death of one group during requests."""

from __future__ import annotations

import asyncio
import math

import gateway_groups
import pytest
import uvloop

from dsv4_testkit.http_load import connect, post
from dsv4_testkit.waiting import free_ports


def test_a_killed_group_costs_no_request() -> None:
    slowest = []
    # The best of several attempts, for a busy machine.
    while len(slowest) < 4 and min(slowest, default=1.0) >= 1.0:
        found = gateway_groups.failover(8.0 if slowest else 5.0, clients=8)
        assert found.failed == 0
        assert found.under == 8
        # A pause of the machine may leave no time for new requests.
        slowest.append(max(found.after, default=math.inf))
    # New requests do not wait for the verdict on the lost group.
    assert min(slowest) < 1.0


def test_the_death_of_a_gateway_and_a_group_breaks_only_that_gateways_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The guarantee of docs/decisions/0007."""
    # The requests are still open when the processes are killed, also on a busy machine.
    monkeypatch.setattr(gateway_groups, "PAUSE", 0.2)
    fronts = free_ports(2)
    urls = [f"http://127.0.0.1:{front}/v1/completions" for front in fronts]

    async def scenario(group, first) -> None:
        await asyncio.sleep(1.0)
        doomed, safe = [[await connect(url) for _ in range(4)] for url in urls]
        asked = [
            [asyncio.ensure_future(one.ask(post(url, gateway_groups.BODY))) for one in connections]
            for url, connections in zip(urls, (doomed, safe), strict=True)
        ]
        await asyncio.sleep(0.3)
        first.kill()
        group.kill()
        for broken in asked[0]:
            with pytest.raises(ConnectionError):
                await broken
        assert all(gateway_groups.whole(answer) for _, answer in await asyncio.gather(*asked[1]))
        again = await connect(urls[1])
        _, answer = await again.ask(post(urls[1], gateway_groups.BODY))
        assert gateway_groups.whole(answer)
        for one in (*safe, again):
            one.close()

    with (
        gateway_groups.groups() as (ports, group),
        gateway_groups.gateway(ports, fronts[0]) as first,
        gateway_groups.gateway(ports, fronts[1]),
    ):
        uvloop.run(scenario(group, first))
