"""The variables that tell NCCL, Gloo and UCX of this member what was found, each with its reason; pure."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_runtime.contract import FabricPlan, FabricSetting
from dsv4_runtime.fabric.choose import FabricChoice, Fit, common_range, nccl_gid


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable."""

    name: str
    value: str
    reason: str


def variables(choice: FabricChoice, plan: FabricPlan, rank: int, *, ring: bool = False) -> tuple[Variable, ...]:
    """Return the environment of Ray and vLLM on this member. `ring`: not every rail reaches every member.

    Only what must be said: whatever NCCL finds out rightly by itself stays unset.
    """
    found: list[Variable] = []
    if choice.sockets is not None:
        name = choice.sockets.name
        peers = "the other members reach this one over it"
        found += [
            # "=": exactly this interface, not every one whose name begins so.
            Variable("NCCL_SOCKET_IFNAME", f"={name}", f"bootstrap of NCCL: {peers}"),
            Variable("GLOO_SOCKET_IFNAME", name, f"Gloo would take the interface of the host's name: {peers}"),
            Variable("TP_SOCKET_IFNAME", name, f"the same for torch's TensorPipe: {peers}"),
        ]
    if not choice.fit:
        off = "no RDMA port here is fit; one that is half there would stall the start instead of being passed over"
        return (*found, Variable("NCCL_IB_DISABLE", "1", off), *_LOG)
    names = [fit.port.name for fit in choice.fit]
    found += [
        Variable("NCCL_IB_DISABLE", "0", "an image or a shell may have switched RDMA off"),
        # Both halves of a ConnectX-7 cage of a GB10 carry 100 Gbit/s each: one alone is half the cable.
        Variable("NCCL_IB_HCA", "=" + ",".join(names), "exactly the ports that are up, have an address and a GID"),
    ]
    # UCX only takes what is named: RDMA ports for data, the interface for its own sockets.
    devices = [*names, *([choice.sockets.name] if choice.sockets else [])]
    found.append(Variable("UCX_NET_DEVICES", ",".join(devices), "the same choice for UCX, where vLLM moves KV with it"))
    if plan.require_rdma:
        found.append(
            Variable("NCCL_NET", "IB", "the plan requires RDMA: NCCL ends with an error instead of using sockets")
        )
    found += _gid(choice.fit, plan.setting(rank))
    if ring:
        why = "not every rail reaches every member: NCCL must pick the port that is in the peer's network"
        found += [
            Variable("NCCL_IB_SUBNET_AWARE_ROUTING", "1", why),
            Variable("NCCL_IB_MERGE_NICS", "0", why),
            Variable("NCCL_CROSS_NIC", "1", why),
        ]
    return (*found, *_LOG)


_LOG = (
    Variable("NCCL_DEBUG", "INFO", "NCCL's log is the only proof of the transport that it uses"),
    Variable("NCCL_DEBUG_SUBSYS", "INIT,NET", "only the lines about start and transport"),
)


def _gid(fit: tuple[Fit, ...], setting: FabricSetting) -> list[Variable]:
    """Return what NCCL must be told about GIDs; nothing where it takes the right ones, which is the rule."""
    if setting.gid_index != "Auto":
        return [Variable("NCCL_IB_GID_INDEX", str(setting.gid_index), "set by hand in the deployment")]
    wrong = [item for item in fit if nccl_gid(item.port.gids) != item.gid]
    if not wrong:
        return []
    first = wrong[0]
    why = f"NCCL would take GID {nccl_gid(first.port.gids)} of {first.port.name}, which is not that of an address here"
    # One index goes for all ports, and its slot may be another address' on the next one.
    if len(indices := {item.gid for item in fit}) == 1:
        return [Variable("NCCL_IB_GID_INDEX", str(indices.pop()), why)]
    if (network := common_range(fit)) is not None:
        return [Variable("NCCL_IB_ADDR_RANGE", str(network), why)]
    return []


def gids_cannot_be_told(choice: FabricChoice, setting: FabricSetting) -> bool:
    """Tell whether NCCL would take a wrong GID and no variable can put that right."""
    wrong = any(nccl_gid(item.port.gids) != item.gid for item in choice.fit)
    return setting.gid_index == "Auto" and wrong and not _gid(choice.fit, setting)
