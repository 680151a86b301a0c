"""`hosts.yaml`."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_operator.api import Severity
from dsv4_operator.backends.hosts.backend import read_here
from dsv4_operator.backends.hosts.documents import Host, InvalidInventory, Inventory, load_inventory
from dsv4_operator.backends.hosts.survey import Here, driver_findings, silent_machine

TWO = """
hosts:
- name: spark-1
  address: 192.168.100.1
- name: spark-2
  ssh: me@spark-2.local
  address: 192.168.100.2
  interface: enp1s0f0np0
"""


def test_two_machines() -> None:
    found = load_inventory(TWO)
    assert [host.target for host in found.hosts] == ["spark-1", "me@spark-2.local"]
    assert [found.url(host) for host in found.hosts] == ["http://192.168.100.1:8970", "http://192.168.100.2:8970"]
    assert found.state_dir == "/var/lib/dsv4"
    assert load_inventory(found.to_json()) == found


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        ({"hosts": []}, "hosts", "WrongCount"),
        ({"hosts": "spark-1"}, "hosts", "WrongType"),
        ({"hosts": [{"name": "a"}]}, "hosts[0].address", "Required"),
        ({"hosts": [{"address": "10.0.0.1"}]}, "hosts[0].name", "Required"),
        ({"hosts": [{"name": "a", "address": "spark-1"}]}, "hosts[0].address", "InvalidValue"),
        ({"hosts": [{"name": "a", "address": "fe80::1"}]}, "hosts[0].address", "InvalidValue"),
        ({"hosts": [{"name": "a", "address": "0.0.0.0"}]}, "hosts[0].address", "InvalidValue"),
        ({"hosts": [{"name": "a", "address": "10.0.0.1", "adress": 1}]}, "hosts[0].adress", "UnknownField"),
        ({"hosts": [{"name": "a b", "address": "10.0.0.1"}]}, "hosts[0].name", "InvalidValue"),
        ({"hosts": [{"name": "a", "ssh": "-oX", "address": "10.0.0.1"}]}, "hosts[0].ssh", "InvalidValue"),
        ({"hosts": [{"name": "a", "address": "10.0.0.1", "interface": "a b"}]}, "hosts[0].interface", "InvalidValue"),
        ({"hosts": [{"name": "a", "address": "10.0.0.1"}] * 2}, "hosts[1].name", "Duplicate"),
        (
            {"hosts": [{"name": "a", "address": "10.0.0.1"}, {"name": "b", "address": "10.0.0.1"}]},
            "hosts[1].address",
            "Duplicate",
        ),
        (
            {"hosts": [{"name": "a", "ssh": "b", "address": "10.0.0.1"}, {"name": "b", "address": "10.0.0.2"}]},
            "hosts[1].ssh",
            "Duplicate",
        ),
        ({"stateDir": "var"}, "stateDir", "InvalidValue"),
        ({"stateDir": "/var/../etc"}, "stateDir", "InvalidValue"),
        ({"servicePort": 80}, "servicePort", "OutOfRange"),
        ({"servicePort": "8970"}, "servicePort", "WrongType"),
        ({"machines": []}, "machines", "UnknownField"),
    ],
)
def test_mistakes(change: dict[str, Any], field: str, reason: str) -> None:
    document = {"hosts": [{"name": "spark-1", "address": "10.0.0.1"}], **change}
    with pytest.raises(InvalidInventory) as caught:
        load_inventory(json.dumps(document))
    found = caught.value.findings[0]
    assert (found.field, found.reason) == (field, reason)
    assert found.remedy


@pytest.mark.parametrize("text", ["", "- a", "hosts: [", "a: 1\n---\nb: 2", "hosts: 1\nhosts: 2"])
def test_invalid_inventories_are_refused(text: str) -> None:
    with pytest.raises(InvalidInventory):
        load_inventory(text)


# YAML refuses DEL in a document.
TEXT = st.text(st.characters(exclude_characters="\x7f", exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(["name", "ssh", "address", "interface", "stateDir", "servicePort", "hosts"]),
    JSON | st.text(alphabet="/.-ab@: \n'\"$`\\;0", max_size=20),
)
def test_any_value_is_accepted_or_refused_with_its_field(field: str, value: object) -> None:
    host: dict[str, object] = {"name": "a", "address": "10.0.0.1"}
    document: dict[str, object] = {"hosts": [host]}
    (document if field in ("stateDir", "servicePort", "hosts") else host)[field] = value
    fields: list[str] | None = None
    try:
        found = load_inventory(json.dumps(document))
    except InvalidInventory as error:
        fields = [finding.field for finding in error.findings]
    if fields is not None:
        assert any(field in name for name in fields)
        return
    assert isinstance(found, Inventory)
    for text in (found.state_dir, *(host.target for host in found.hosts), *(host.name for host in found.hosts)):
        # Safe as an argument of ssh and in a unit file.
        assert not text.startswith("-")
        assert not set(text) & set(" \n'\"$`\\;")


def machines(count: int) -> Inventory:
    places = [Host(name=f"spark-{n}", address=f"10.0.0.{n}", interface="eth0") for n in range(1, count + 1)]
    return Inventory(hosts=tuple(places))


@given(
    st.integers(1, 4),
    st.data(),
    st.text(max_size=30),
    st.none() | st.sampled_from(sorted(errno.errorcode)),
    st.none() | st.builds(Here, st.booleans(), st.booleans(), st.lists(st.just("10.9.9.9 on eth1")).map(tuple)),
)
def test_a_silent_machine_is_named_with_the_reason(
    count: int, data: st.DataObject, problem: str, code: int | None, here: Here | None
) -> None:
    place = data.draw(st.integers(0, count - 1))
    inventory = machines(count)
    found = silent_machine(inventory, place, problem, code, here)
    assert found.severity is Severity.REFUSE
    assert found.remedy
    if here is not None and not here.address:
        # Nothing can be concluded about the other machines.
        assert (found.field, found.reason, found.value) == ("hosts[0].address", "AddressChanged", "10.0.0.1")
        assert all(one in found.message for one in here.addresses)
    elif here is not None and not here.link:
        assert (found.field, found.reason, found.value) == ("hosts[0].interface", "LinkMissing", "eth0")
    else:
        assert (found.field, found.value) == (f"hosts[{place}].address", f"10.0.0.{place + 1}")
        assert f"of spark-{place + 1} " in found.message
        names = {errno.ECONNREFUSED: "ServiceMissing", errno.ENOSPC: "DiskFull", errno.EPROTO: "MachineRefuses"}
        unreachable = "MachineUnreachable" if code in (errno.EHOSTUNREACH, errno.ENETUNREACH) else found.reason
        assert found.reason == names.get(code or 0, unreachable)
        assert found.reason == "ServiceMissing" or problem in found.message


@pytest.mark.skipif(not os.path.exists("/sys/class/net/lo/carrier"), reason="/sys is that of another network")
def test_the_network_of_this_machine() -> None:
    def here(address: str, interface: str | None) -> Here:
        return read_here(Inventory(hosts=(Host(name="a", address=address, interface=interface),)))

    assert here("127.0.0.1", None) == here("127.0.0.1", "lo") == Here()
    assert here("127.0.0.1", "none0") == Here(link=False)
    # Of documentation (RFC 5737), so of no machine.
    assert not here("203.0.113.9", "lo").address


def test_different_drivers() -> None:
    assert list(driver_findings({"a": "580.95", "b": "580.95", "c": ""})) == []
    (found,) = driver_findings({"a": "580.95", "b": "590.44", "c": ""})
    assert (found.reason, found.severity) == ("MachinesDiffer", Severity.WARN)
    assert "a 580.95, b 590.44" in found.message
