"""The last valid specification, parsed without the current rules."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4_operator.api import (
    DeploymentStatus,
    DSV4Deployment,
    Finding,
    GroupStatus,
    InvalidDeployment,
    RolloutStatus,
    parse,
    security,
)
from dsv4_operator.planning.revision import accepted_text, formed_from, last_valid, read_accepted, revision, revision_of

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
MANIFESTS = [path for path in EXAMPLES if "hardware:" in path.read_text()]


def manifest(path: Path = EXAMPLES[0]) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    found["metadata"] |= {"namespace": "team", "generation": 3, "uid": "u"}
    return found


def kept(deployment: DSV4Deployment, **rollout: str) -> DeploymentStatus:
    groups = (GroupStatus(index=0, incarnation=1, revision=revision(deployment)),)
    return DeploymentStatus(groups=groups, rollout=RolloutStatus(**rollout))


NANO = next(path for path in MANIFESTS if path.name == "nano.yaml")


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        yield at
    for name, one in inner or ():
        yield from leaves(one, (*at, name))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("field", ["accepted", "served"])
def test_a_stored_specification_that_breaks_a_rule_of_today_is_read_as_it_was(path: Path, field: str) -> None:
    """Replaces every text by one that is refused today and that an earlier version accepted."""
    deployment = parse(manifest(path))
    texts = 0
    for leaf in leaves(json.loads(formed_from(deployment))):
        spec = json.loads(formed_from(deployment))
        holder = spec
        for step in leaf[:-1]:
            holder = holder[step]
        if not isinstance(holder[leaf[-1]], str) or holder[leaf[-1]][:1].isdigit():
            # Durations and quantities are parsed as such.
            continue
        holder[leaf[-1]] = "an old value!\x00"
        formed = json.dumps(spec, sort_keys=True, separators=(",", ":"))
        text = {"accepted": accepted_text(deployment, formed), "served": formed}
        changed = manifest(path)
        changed["spec"]["engine"] = {"maxModelLen": "junk"}
        found = last_valid(changed, kept(deployment, **{field: text[field]}))
        assert found is not None, leaf
        assert found.formable, leaf
        assert formed_from(found.deployment) == formed, leaf
        assert found.deployment.spec.recovery == deployment.spec.recovery
        texts += 1
    assert texts


def test_a_rule_over_several_fields_that_is_new_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in MANIFESTS:
        deployment = parse(manifest(path))
        monkeypatch.setattr(
            "dsv4_operator.api.deployment.check_spec", lambda _: [Finding("spec", "Refused", "is refused")]
        )
        with pytest.raises(InvalidDeployment):
            parse(manifest(path))
        for status in (
            kept(deployment),
            kept(deployment, served=formed_from(deployment)),
            kept(deployment, accepted=accepted_text(deployment, formed_from(deployment))),
        ):
            found = last_valid(manifest(path), status)
            assert found is not None
            assert found.formable
            assert found.deployment.spec == deployment.spec
            assert found.deployment.metadata.generation == 3
        monkeypatch.undo()


def test_a_stricter_list_of_flags_changes_no_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    given = manifest(NANO)
    given["spec"]["engine"]["extraArgs"] = ["--seed=4"]
    deployment = parse(copy.deepcopy(given))
    status = kept(deployment, accepted=accepted_text(deployment, formed_from(deployment)))
    monkeypatch.setitem(security._OWNED_FLAGS, "--seed", "remove it")
    found = last_valid(given, status)
    assert found is not None
    assert revision(found.deployment) == revision(deployment)


def test_without_groups_there_is_nothing_to_supervise() -> None:
    assert last_valid(manifest(NANO), DeploymentStatus()) is None


def test_an_unreadable_specification_forms_nothing() -> None:
    deployment = parse(manifest(NANO))
    changed = manifest(NANO)
    changed["spec"]["engine"]["maxNumSeqs"] = -5
    changed["spec"]["replicas"] = 0.5
    status = kept(deployment, accepted="junk", served="[]")
    assert last_valid(changed, status) is None, "replicas are no number"
    changed["spec"]["replicas"] = 1
    found = last_valid(changed, status)
    assert found is not None
    assert not found.formable


@pytest.mark.parametrize("text", ["", "junk", "[]", "{}", '{"generation": "1", "formed": "", "applied": {}}'])
def test_an_invalid_stored_specification_is_ignored(text: str) -> None:
    assert read_accepted(text) is None


def test_the_stored_text_is_small() -> None:
    for path in MANIFESTS:
        deployment = parse(manifest(path))
        text = accepted_text(deployment, formed_from(deployment))
        assert len(text) < 2 * len(json.dumps(manifest(path)["spec"])) + 200
        assert text == accepted_text(deployment, formed_from(deployment))


@pytest.mark.parametrize("field", ["accepted", "served"])
def test_a_stored_specification_with_a_field_that_is_gone_forms_nothing(field: str) -> None:
    deployment = parse(manifest(NANO))
    formed = json.dumps({**json.loads(formed_from(deployment)), "goneField": 1}, sort_keys=True, separators=(",", ":"))
    text = {"accepted": accepted_text(deployment, formed), "served": formed}
    groups = (GroupStatus(index=0, incarnation=1, revision=revision_of(formed)),)
    found = last_valid(manifest(NANO), DeploymentStatus(groups=groups, rollout=RolloutStatus(**{field: text[field]})))
    assert found is not None
    assert not found.formable
