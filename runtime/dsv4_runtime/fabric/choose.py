"""Choice of the RDMA ports that a member uses and of the interface over which its sockets go; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from dsv4_runtime.contract import FabricSetting, Rail
from dsv4_runtime.fabric.node import ROCE_V2, Gid, Interface, Node, Port


@dataclass(frozen=True, slots=True)
class Fit:
    """An RDMA port that can be used, with what belongs to it."""

    port: Port
    interface: Interface
    address: IPv4Interface
    gid: int
    """Index of the RoCE v2 GID that stands for `address`."""


@dataclass(frozen=True, slots=True)
class FabricChoice:
    """Interface and RDMA ports that a member uses, and why not more."""

    sockets: Interface | None
    """Over which NCCL's bootstrap and Gloo speak; None: no interface has the member's address."""
    address: IPv4Interface | None
    """The member's address there."""
    fit: tuple[Fit, ...]
    """RDMA ports to use."""
    unfit: tuple[tuple[Port, str], ...]
    """The other ports, each with the reason."""
    missing: tuple[str, ...] = ()
    """RDMA devices that were set by hand and are not there."""

    def rails(self) -> tuple[Rail, ...]:
        """Return the addresses at which this member speaks: that of its sockets first, then one for each RDMA port."""
        found: list[Rail] = []
        if self.sockets is not None and self.address is not None:
            hca = next((fit.port.name for fit in self.fit if fit.address.ip == self.address.ip), None)
            found.append(
                Rail(interface=self.sockets.name, address=str(self.address), mtu=self.sockets.mtu, hca=hca),
            )
        for fit in self.fit:
            if self.address is None or fit.address.ip != self.address.ip:
                rail = Rail(
                    interface=fit.interface.name, address=str(fit.address), mtu=fit.interface.mtu, hca=fit.port.name
                )
                found.append(rail)
        return tuple(found)


def choose_fabric(node: Node, address: str | None = None, setting: FabricSetting | None = None) -> FabricChoice:
    """Return what a member at `address` uses. Without one (`dsv4 doctor`) the first fit port also carries sockets.

    A port over whose interface the default route leads is left out unless it was set by hand: it is the machine's way
    to the rest of the world, not a fabric.
    """
    setting = setting or FabricSetting()
    fit: list[Fit] = []
    unfit: list[tuple[Port, str]] = []
    for port in node.ports:
        if setting.hcas is not None and port.hca not in setting.hcas:
            unfit.append((port, "it is not among the devices that were set by hand"))
            continue
        found = _judge(node, port, by_hand=setting.hcas is not None)
        if isinstance(found, Fit):
            fit.append(found)
        else:
            unfit.append((port, found))
    sockets, own = _sockets(node, address, setting, fit)
    here = {port.hca for port in node.ports}
    missing = tuple(hca for hca in setting.hcas or () if hca not in here)
    return FabricChoice(sockets, own, tuple(fit), tuple(unfit), missing)


def _judge(node: Node, port: Port, *, by_hand: bool) -> Fit | str:
    """Return the port as one to use, or the reason why it is not."""
    if port.link_layer != "Ethernet":
        return f"its link layer is {port.link_layer}, not Ethernet: dsv4 knows RoCE only"
    if not port.active:
        return f"its link is not up ({port.state})"
    interface = node.interfaces.get(port.interface) if port.interface else None
    if interface is None:
        return "it has no network interface here"
    if not interface.up:
        return f"its interface {interface.name} is down or has no carrier"
    if not interface.addresses:
        return f"its interface {interface.name} has no IPv4 address"
    if interface.default_route and not by_hand:
        return f"the default route leads over its interface {interface.name}"
    for address in interface.addresses:
        if (index := port.gid_index(address.ip)) is not None:
            if not port.usable:
                return "its device file in /dev/infiniband is missing"
            return Fit(port, interface, address, index)
    return f"no {ROCE_V2} GID stands for {interface.addresses[0].ip} of {interface.name}"


def _sockets(
    node: Node, address: str | None, setting: FabricSetting, fit: Sequence[Fit]
) -> tuple[Interface | None, IPv4Interface | None]:
    if address is None:
        first = next(iter(fit), None)
        return (first.interface, first.address) if first else (None, None)
    own = _parsed(address)
    holder = node.interface_of(own) if own else None
    interface = node.interfaces.get(setting.interface) if setting.interface else holder
    if interface is None:
        return None, None
    mine = next((entry for entry in interface.addresses if entry.ip == own), None)
    return interface, mine or next(iter(interface.addresses), None)


def _parsed(address: str) -> IPv4Address | None:
    try:
        return IPv4Address(address)
    except ValueError:
        return None


def nccl_gid(gids: Sequence[Gid], within: IPv4Network | None = None) -> int:
    """Return the index that NCCL takes by itself, with its defaults (IPv4, RoCE v2) and NCCL_IB_ADDR_RANGE=`within`.

    Follows `ncclIbGetGidIndex` of NCCL 2.21 to 2.30 (src/transport/net_ib/connect.cc): the first entry is replaced by
    the first IPv4 one, which is replaced by one of the wanted version. It does not ask whether the interface (still)
    has that address.
    """
    table = {gid.index: gid for gid in gids}
    best = 0
    for index in range(1, max(table, default=0) + 1):
        candidate, present = table.get(index), table.get(best)
        if candidate is None or candidate.ipv4 is None or (within is not None and candidate.ipv4 not in within):
            continue
        if present is None or present.ipv4 is None or (candidate.kind != present.kind and candidate.kind == ROCE_V2):
            best = index
    return best


def common_range(fit: Sequence[Fit]) -> IPv4Network | None:
    """Return the narrowest IPv4 network that holds the addresses of all ports in use and makes NCCL take the right GID
    of each; None if there is none.
    """
    addresses = sorted(item.address.ip for item in fit)
    if not addresses:
        return None
    length = next(
        length for length in range(32, -1, -1) if addresses[-1] in IPv4Network((addresses[0], length), strict=False)
    )
    network = IPv4Network((addresses[0], length), strict=False)
    right = all(nccl_gid(item.port.gids, network) == item.gid for item in fit)
    return network if right and length > 0 else None
