"""GPUs of this machine: detection, claims, assignment to members, and errors that name a missing part."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from dsv4_operator.api import DSV4Deployment, Hardware, load
from dsv4_operator.backends.hosts.service import HostService
from dsv4_operator.backends.local import gpus
from dsv4_operator.backends.local.backend import LocalBackend
from dsv4_operator.backends.local.facts import local_facts
from dsv4_operator.backends.local.gpus import GpuInventory, claimed
from dsv4_operator.backends.local.software import Software
from dsv4_operator.backends.local.state import DeploymentState, StateError
from dsv4_operator.cli.output import CommandError
from dsv4_operator.cli.sources.base import read_file
from dsv4_operator.planning import Facts, PlanRefused, plan_group
from dsv4_operator.planning.images import profile_named
from dsv4_testkit.errors import raises_naming
from dsv4_testkit.fake_cuda import build_cuda
from dsv4_testkit.fake_nvml import GIB, FakeNvml, Gpu
from dsv4_testkit.supervised import Supervised

EXAMPLE = Path(__file__).parents[3] / "examples" / "nano-gpu.yaml"
RTX = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"


def cards(count: int, name: str = "NVIDIA H100 80GB HBM3") -> list[Gpu]:
    # Claims are valid for the whole machine, and another process may run these tests too.
    return [Gpu(uuid=f"GPU-{os.getpid()}-{number}", name=name) for number in range(count)]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    found = FakeNvml(*cards(2))
    monkeypatch.setattr(gpus, "pynvml", found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def nano(**topology: object) -> DSV4Deployment:
    made = load(EXAMPLE.read_text(), lambda: Hardware.H100)
    return made.model_copy(
        update={"spec": made.spec.model_copy(update={"topology": made.spec.topology.model_copy(update=topology)})}
    )


def facts(deployment: DSV4Deployment, found: GpuInventory, *, isolated: bool = True) -> Facts:
    state = DeploymentState(Path("/s"), "nano-gpu")
    return local_facts(
        deployment,
        state,
        isolated=isolated,
        memory=64 * GIB,
        cards=found.cards,
        software=Software(profile_named("vllm-0.33")),
    )


def test_cards_are_read_from_the_driver(driver: FakeNvml) -> None:
    driver.gpus[1].processes = {4711: 60 * GIB}
    found = gpus.find()
    assert (found.driver, found.kinds()) == ("580.159.04", "2 × NVIDIA H100 80GB HBM3")
    first, second = found.cards
    assert (first.index, first.uuid, first.capability) == (0, driver.gpus[0].uuid, (9, 0))
    assert (first.machine, first.hardware) == ("h100", "H100")
    assert second.memory_bytes is not None
    assert second.free_bytes == second.memory_bytes - 60 * GIB - 600 * 2**20
    assert second.holders == ((4711, 60 * GIB),)
    assert driver.shut


def test_the_cards_of_the_catalog_by_their_names_in_nvml(driver: FakeNvml) -> None:
    names = {
        RTX: "rtx-pro-6000-workstation",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtx-pro-6000-max-q",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-server",
        "NVIDIA GB10": "gb10",
        "NVIDIA H200": "h200",
        "NVIDIA GeForce RTX 4090": None,
    }
    driver.gpus = [Gpu(name=name, total=None if "GB10" in name else 2**36) for name in names]
    found = gpus.find()
    assert {card.name: card.machine for card in found.cards} == names
    assert [card.memory_bytes for card in found.cards if card.machine == "gb10"] == [None]


def test_a_driver_that_does_not_answer_is_waited_for_no_longer(driver: FakeNvml) -> None:
    driver.answers.clear()
    before = set(threading.enumerate())
    for _ in range(3):
        problem = gpus.find(seconds=0.05).problem
        assert problem is not None
        assert all(part in problem for part in ("0.05 s", "`dmesg`", "`nvidia-smi`"))
    assert len(set(threading.enumerate()) - before) == 1
    driver.answers.set()
    # The call that hung answers late; the next one is new.
    gpus.find()
    driver.gpus = [Gpu(name="NVIDIA GB10")]
    assert [card.name for card in gpus.find().cards] == ["NVIDIA GB10"]


@pytest.mark.parametrize(
    ("variable", "seen"), [("1", [1]), ("0,1", [0, 1]), ("", []), ("GPU-", [0, 1]), ("7", []), ("1, 0", [0, 1])]
)
def test_cuda_visible_devices_is_kept_to(
    variable: str, seen: list[int], driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    found = gpus.find()
    assert [card.index for card in found.cards] == seen
    assert (found.problem == "CUDA_VISIBLE_DEVICES excludes every GPU") is not seen


def test_a_card_that_fell_off_the_bus_does_not_hide_the_others(driver: FakeNvml) -> None:
    before = gpus.find().cards
    driver.gpus[0].lost = True
    assert [card.index for card in gpus.find().cards] == [1]
    lost, there = gpus.refresh(before)
    assert (lost.uuid, lost.free_bytes) == (before[0].uuid, None)
    assert there == before[1]


def test_omitted_hardware_is_detected(driver: FakeNvml, tmp_path: Path) -> None:
    assert read_file(str(EXAMPLE), detect_hardware=True).spec.topology.hardware is Hardware.H100
    driver.gpus = cards(1, RTX)
    assert read_file(str(EXAMPLE), detect_hardware=True).spec.topology.hardware is Hardware.RTXPRO6000
    driver.gpus = cards(1, "NVIDIA GeForce RTX 4090")
    with pytest.raises(CommandError) as refused:
        read_file(str(EXAMPLE), detect_hardware=True)
    found = refused.value.findings[0]
    assert (found.field, found.reason) == ("spec.topology.hardware", "Required")
    assert "defaults to CPU" in found.message
    assert "1 × NVIDIA GeForce RTX 4090" in found.message
    with pytest.raises(CommandError, match=r"spec\.topology\.hardware: is required"):
        read_file(str(EXAMPLE))
    least = tmp_path / "least.yaml"
    least.write_text(EXAMPLE.read_text().split("  topology:")[0])
    driver.gpus = cards(1)
    assert read_file(str(least), detect_hardware=True).spec.topology.hardware is Hardware.H100


def test_cards_are_held_by_one_deployment_at_a_time_and_it_is_named(driver: FakeNvml) -> None:
    found = gpus.find()
    code = f"""
import sys, time
from dsv4_testkit.fake_cuda import build_cuda
from dsv4_testkit.fake_nvml import FakeNvml, Gpu
from dsv4_operator.api import Hardware, TopologySpec
from dsv4_operator.backends.local import gpus
from dsv4_operator.backends.local.gpus import claimed
gpus.pynvml = FakeNvml(*[Gpu(uuid=uuid) for uuid in {[card.uuid for card in found.cards]!r}])
with claimed(TopologySpec(hardware=Hardware.H100), gpus.find()) as cards:
    print(cards[0].index, flush=True)
    time.sleep(600)
"""
    path = str(Path(__file__).parents[2] / "kit")
    other = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n{code}", "--name", "first"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "0\n"
        with claimed(nano().spec.topology, found) as mine:
            assert [card.index for card in mine] == [1]
        with (
            raises_naming(StateError, "spec.topology.devicesPerNode", "2 GPUs of H100", "1 of 2 are free") as refused,
            claimed(nano(devices_per_node=2).spec.topology, found),
        ):
            pass
        assert f"is held by the deployment 'first' (process {other.pid}); end that deployment" in str(refused.value)
        other.kill()
        other.wait()
        # A killed loop holds no claim, and neither does the refused attempt.
        with claimed(nano(devices_per_node=2).spec.topology, found) as both:
            assert [card.index for card in both] == [0, 1]
    finally:
        other.kill()
        other.communicate()


def test_every_group_has_cards_of_its_own(driver: FakeNvml) -> None:
    made = nano()
    asked = made.model_copy(update={"spec": made.spec.model_copy(update={"replicas": 2})})
    found = gpus.find()
    with claimed(asked.spec.topology, found, asked.spec.replicas) as both:
        seen = facts(asked, GpuInventory(cards=both))
    given = [[gpu.uuid for gpu in seen.of_group(group, 1)[0].gpus] for group in (0, 1)]
    assert given == [[card.uuid] for card in found.cards]
    with (
        raises_naming(StateError, "spec.topology.devicesPerNode", "3 GPUs of H100", "this machine has 2"),
        claimed(asked.spec.topology, found, 3),
    ):
        pass


def test_unused_cards_are_taken_first(driver: FakeNvml) -> None:
    driver.gpus[0].processes = {1: 70 * GIB}
    with claimed(nano().spec.topology, gpus.find()) as mine:
        assert [card.index for card in mine] == [1]


@pytest.mark.parametrize(
    ("present", "says"),
    [
        (FakeNvml(missing="NVML Shared Library Not Found"), "NVML Shared Library Not Found); install NVIDIA's driver"),
        (
            FakeNvml(Gpu(name=RTX)),
            f"1 GPU of H100 is required, and this machine has 1 × {RTX}; write that number and kind",
        ),
        (FakeNvml(), "this machine offers none: the driver has no GPU"),
    ],
)
def test_missing_gpus_and_drivers_are_named(present: FakeNvml, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "pynvml", present)
    with pytest.raises(StateError) as refused, claimed(nano().spec.topology, gpus.find()):
        pass
    assert says in str(refused.value)


def test_one_member_gets_its_cards_by_uuid(driver: FakeNvml) -> None:
    deployment = nano(devices_per_node=2)
    for isolated in (True, False):
        plan = plan_group(deployment, facts(deployment, gpus.find(), isolated=isolated), group=0, incarnation=1)
        (member,) = plan.members
        uuids = tuple(gpu.uuid for gpu in driver.gpus)
        assert (member.devices, member.gpus) == (2, uuids)
        assert member.env["CUDA_VISIBLE_DEVICES"] == ",".join(uuids)
        assert "--num-gpus=2" in member.ray_args
        assert "--tensor-parallel-size=2" in plan.engine.args
        assert plan.health.gpus
        assert "DSV4_DEV_PLATFORM" not in plan.environment(0)


def test_one_member_a_card_needs_no_fabric_and_is_a_host_of_its_own_for_nccl(driver: FakeNvml) -> None:
    deployment = nano(nodes_per_group=2)
    plan = plan_group(deployment, facts(deployment, gpus.find()), group=0, incarnation=1)
    assert [member.gpus for member in plan.members] == [(gpu.uuid,) for gpu in driver.gpus]
    assert [member.env["NCCL_HOSTID"] for member in plan.members] == ["local-0", "local-1"]
    assert plan.fabric is None


def test_the_flags_of_a_nano_on_a_gpu(driver: FakeNvml) -> None:
    plan = plan_group(nano(), facts(nano(), gpus.find()), group=0, incarnation=1)
    wanted = {"--max-model-len=4096", "--block-size=256", "--kv-cache-dtype=fp8", "--gpu-memory-utilization=0.3"}
    assert wanted <= set(plan.engine.args)
    names = [argument.partition("=")[0] for argument in plan.engine.args]
    # The generated checkpoint has none of them; vLLM refuses an empty name.
    assert not {"--tokenizer-mode", "--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice"} & set(
        names
    )
    assert plan.weights.path == "/s/weights/nano-s0-fp8"
    assert plan.expectations.gpu_bytes == int(0.3 * 85_017_493_504)


def test_an_engine_that_does_not_fit_beside_another_program_is_refused_and_that_named(driver: FakeNvml) -> None:
    driver.gpus[0].processes = {1: 60 * GIB, 2**22 + 1: GIB}
    deployment = nano()
    with pytest.raises(PlanRefused) as refused:
        plan_group(deployment, facts(deployment, gpus.find()), group=0, incarnation=1)
    comm = Path("/proc/1/comm").read_text().strip()
    assert (
        f"has 18.1 GiB of free memory, and the engine needs 23.8 GiB (process 1 ({comm}) holds 60.0 GiB, process "
        in (str(refused.value))
    )
    assert refused.value.reason == "MemoryShort"


async def test_free_memory_is_read_again_while_no_member_runs(driver: FakeNvml, supervised: Supervised) -> None:
    """Memory of ended members is free for the next plan; memory of other programs is not."""
    with tempfile.TemporaryDirectory(prefix="d4-") as root:
        state = DeploymentState(Path(root), "nano-gpu")
        state.prepare()
        found, software = gpus.find(), Software(profile_named("vllm-0.33"))
        backend = LocalBackend(
            state,
            supervised.again(),
            isolated=False,
            changed=lambda: None,
            cards=found.cards[:1],
            software=software,
        )
        assert found.cards[0].memory_bytes is not None
        for taken in (0, 60 * GIB, 0):
            driver.gpus[0].processes = {1: taken}
            (node,) = (await backend.facts(nano())).nodes
            (gpu,) = node.gpus
            assert gpu.free_bytes == found.cards[0].memory_bytes - 600 * 2**20 - taken
        await backend.close()


@pytest.mark.parametrize(("fault", "text"), [("cuMemcpyPeer:2:lost", "arrives with wrong bytes"), ("cuInit:9:1", "")])
async def test_copies_between_the_gpus_are_tested_once(
    driver: FakeNvml, supervised: Supervised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, text: str
) -> None:
    """`dsv4 up` runs the test on this machine, and so does the service of a machine of `--hosts`."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build_cuda(tmp_path)))
    monkeypatch.setenv("FAKE_FAULT", fault)
    with tempfile.TemporaryDirectory(prefix="d4-") as root:
        state = DeploymentState(Path(root), "nano-gpu")
        state.prepare()
        cards, software, processes = gpus.find().cards, Software(profile_named("vllm-0.33")), supervised.again()
        backend = LocalBackend(state, processes, isolated=False, changed=lambda: None, cards=cards, software=software)
        facts = await backend.facts(nano(devices_per_node=2))
        assert all(text in node.unsafe_copies and bool(node.unsafe_copies) == bool(text) for node in facts.nodes)
        await backend.close()
        # The driver would fail now.
        monkeypatch.setenv("FAKE_FAULT", "cuInit:1:999")
        service = HostService("a", "k" * 32, state, processes)
        await service.start()
        assert service.report().unsafe_copies == facts.nodes[0].unsafe_copies
        await service.close()


def test_gpus_behind_a_silent_driver_are_not_taken_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find", lambda: GpuInventory(problem="the NVIDIA driver has not answered for 10 s"))
    monkeypatch.setattr(gpus, "_DEVICE", tmp_path / "nvidia0")
    assert gpus.hardware_here() == (Hardware.CPU, "the NVIDIA driver has not answered for 10 s")
    (tmp_path / "nvidia0").touch()
    with raises_naming(CommandError, "the NVIDIA driver has not answered for 10 s", "correct that"):
        read_file(str(EXAMPLE), detect_hardware=True)
