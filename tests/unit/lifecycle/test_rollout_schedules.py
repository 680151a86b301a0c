"""Rollouts with repeated changes of the specification, cordoned nodes, deaths of members, and kills of the decider."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dsv4_operator.api import GroupPhase
from dsv4_operator.planning import revision
from dsv4_runtime.contract import Cause
from dsv4_testkit.rollout_world import DEADLINE, NODES, Asked, World


class Rollouts(RuleBasedStateMachine):
    """Changes of the specification, deaths of members, old observations, and kills of the decider at any point."""

    @initialize(
        replicas=st.integers(1, 3),
        limit=st.integers(1, 2),
        strategy=st.sampled_from(["RollingUpdate", "Recreate"]),
        open_seconds=st.sampled_from([0.0, 3.0, 1000.0]),
    )
    def begin(self, replicas: int, limit: int, strategy: str, open_seconds: float) -> None:
        self.world = World(Asked(replicas=replicas, limit=limit, strategy=strategy), open_seconds=open_seconds)
        self.snapshots = [self.world.observe()]

    @rule(age=st.integers(0, 2), crash=st.integers(0, 6), halfway=st.integers(0, 6))
    def troubled_look(self, age: int, crash: int, halfway: int) -> None:
        self.snapshots = [*self.snapshots[-2:], self.world.observe()]
        seen = self.snapshots[max(0, len(self.snapshots) - 1 - age)]
        if len(seen) == max(self.world.asked.replicas, len(self.world.kept.groups)):
            self.world.step(seen, crash, halfway)

    @rule(looks=st.integers(1, 12), seconds=st.sampled_from([0.5, 2.0, 10.0, 60.0]))
    def calm(self, looks: int, seconds: float) -> None:
        self.world.go_on(looks, seconds)

    @rule(how=st.sampled_from([None, None, "config", "dies", "never"]), seed=st.integers(0, 4))
    def change(self, how: str | None, seed: int) -> None:
        self.world.asked = self.world.asked.but(seed=seed)
        if how is not None and seed not in {one.seed for one in self.world.alive()} | {0}:
            self.world.bad[seed] = how

    @rule(what=st.sampled_from(["suspend", "resume", "restart", "pause", "go on", "gateway"]))
    def user(self, what: str) -> None:
        asked = self.world.asked
        changes: dict[str, object] = {
            "suspend": {"suspend": True},
            "resume": {"suspend": False},
            "restart": {"restarts": asked.restarts + 1, "generation": asked.generation},
            "pause": {"paused": True, "generation": asked.generation},
            "go on": {"paused": False, "generation": asked.generation},
            "gateway": {"held": asked.held + 1},
        }[what]
        self.world.asked = asked.but(**changes)

    @rule(nodes=st.sets(st.sampled_from(NODES), max_size=3), listed=st.booleans())
    def cordon(self, nodes: set[str], listed: bool) -> None:
        self.world.cordon(*nodes, listed=listed)

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data(), how=st.sampled_from(["dies", "fails", "silent", "speaks"]))
    def trouble(self, data: st.DataObject, how: str) -> None:
        member = data.draw(st.sampled_from(self.world.alive()))
        match how:
            case "dies":
                member.ended = "killed by SIGKILL"
            case "fails":
                member.fail(Cause.ENGINE_CORE_DIED, self.world.now)
            case _:
                member.silent = how == "silent"

    def teardown(self) -> None:
        """After the trouble ends, every group serves the right specification or was given up."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.asked = world.asked.but(suspend=False, paused=False, generation=world.asked.generation)
        # Every group has a node.
        world.cordon(*sorted(world.cordoned)[:1])
        for one in world.alive():
            one.silent = False
        for _ in range(150):
            world.go_on(seconds=5.0)
            # Kubelets and heads end a start that never completes: it fails after its deadline.
            for one in world.alive():
                if world.bad.get(one.seed) == "never" and world.now - one.started > 2 * DEADLINE:
                    one.fail(Cause.STARTUP_TIMEOUT, world.now)
            served = world.kept.rollout.served
            if served and any(world.all_serve(seed) for seed in range(5)) and not world.pause < 1.0:
                break
        rejected = world.kept.rollout.rejected
        current = revision(world.deployment)
        # A start that never completes is repeated while its budget lasts, so a new attempt may begin just now.
        for _ in range(3):
            phases = {world.group(index).phase for index in range(world.asked.replicas)}
            if GroupPhase.FORMING not in phases:
                break
            world.go_on(seconds=5.0)
        assert phases <= {GroupPhase.SERVING, GroupPhase.FAILED, GroupPhase.RECOVERING, GroupPhase.STARTING}, phases
        if phases == {GroupPhase.SERVING}:
            assert not {one.node for one in world.alive()} & world.cordoned, "left on a cordoned node"
        wanted = {group.revision for group in world.kept.groups if group.phase is GroupPhase.SERVING}
        assert len(wanted) <= 1 or GroupPhase.FAILED in phases, "left between two specifications"
        if phases == {GroupPhase.SERVING}:
            names = {group.index: group.served_names for group in world.kept.groups}
            assert names == {index: (f"of-{seed}",) for index, seed in world.serving().items()}
        if world.asked.seed not in world.bad and rejected is None:
            assert wanted <= {current} or GroupPhase.FAILED in phases
            assert phases <= {GroupPhase.SERVING, GroupPhase.FAILED}
        if rejected is not None:
            assert rejected.revision == current
            assert current not in wanted


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(
    max_examples=200, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
