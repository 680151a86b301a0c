"""Revisions of specifications, and reconstruction of an earlier specification."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4_operator.api import DeploymentStatus, DSV4Deployment, GroupStatus, Hardware, load
from dsv4_operator.api.deployment import RESTART_AT
from dsv4_operator.planning.revision import as_formed_from, formed_from, revision, revision_of, same_specification

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


def read(path: Path) -> DSV4Deployment:
    return load(path.read_text(), lambda: Hardware.RTXPRO6000)


def annotated(deployment: DSV4Deployment, **annotations: str) -> DSV4Deployment:
    metadata = deployment.metadata.model_copy(update={"annotations": annotations})
    return deployment.model_copy(update={"metadata": metadata})


def changed(deployment: DSV4Deployment, **spec: object) -> DSV4Deployment:
    whole = deployment.to_dict()
    return DSV4Deployment.model_validate({**whole, "spec": {**whole["spec"], **spec}})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_comes_back_as_it_was(path: Path) -> None:
    deployment = annotated(read(path), **{RESTART_AT: "2026-11-21T10:00:00Z"})
    formed = formed_from(deployment)
    assert revision_of(formed) == revision(deployment)
    other = changed(deployment, engine={"maxNumSeqs": 7}, suspend=True)
    assert revision(other) != revision(deployment)
    back = as_formed_from(other, formed)
    assert back is not None
    assert revision(back) == revision(deployment)
    assert back.spec.engine == deployment.spec.engine
    assert back.spec.suspend, "what restarts nobody stays as it is now"


def test_a_restart_comes_back_too() -> None:
    before = read(EXAMPLES[0])
    after = annotated(before, **{RESTART_AT: "now", "team": "red"})
    assert revision(before) != revision(after)
    assert same_specification(formed_from(before), formed_from(after))
    back = as_formed_from(after, formed_from(before))
    assert back is not None
    assert back.metadata.annotations == {"team": "red"}


@pytest.mark.parametrize("spec", [{"rollout": {"strategy": "Recreate"}}, {"gateway": {"drain": "1s"}}, {"replicas": 0}])
def test_fields_that_members_do_not_read_do_not_change_the_revision(spec: dict[str, object]) -> None:
    deployment = read(EXAMPLES[0])
    assert revision(changed(deployment, **spec)) == revision(deployment)


@pytest.mark.parametrize(
    "text", ["", "{", "7", '{"model":{}}', '{"engine":{"unknown":1}}', '{"engine":{"maxNumSeqs":4}}']
)
def test_stored_texts_that_parse_differently_are_rejected(text: str) -> None:
    """The last text contains a default, which this version would omit."""
    deployment = read(EXAMPLES[0])
    known = json.loads(formed_from(deployment))
    strange = (
        json.dumps({**known, **json.loads(text)}, sort_keys=True, separators=(",", ":")) if text.endswith("}") else text
    )
    assert as_formed_from(deployment, strange) is None


def test_an_earlier_specification_comes_back_for_a_name_from_before_its_rule() -> None:
    """Names with this ending are refused for new objects only."""
    found = read(EXAMPLES[0])
    status = DeploymentStatus(groups=(GroupStatus(incarnation=1),))
    metadata = found.metadata.model_copy(update={"name": "chat-0-head"})
    deployment = found.model_copy(update={"metadata": metadata, "status": status})
    back = as_formed_from(deployment, formed_from(changed(found, engine={"maxNumSeqs": 7})))
    assert back is not None
    assert back.status == status
