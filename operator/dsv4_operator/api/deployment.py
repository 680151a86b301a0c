"""`DSV4Deployment`: the one object that a user writes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from dsv4_operator.api.cluster import AnnotationKey, LabelKey, LabelValue, Namespace
from dsv4_operator.api.findings import RULES_ERROR, Finding
from dsv4_operator.api.parts import Count, SpecPart
from dsv4_operator.api.rules import check_spec
from dsv4_operator.api.spec import DeploymentSpec
from dsv4_operator.api.status import DeploymentStatus, read_status
from dsv4_operator.api.values import Matches, quoted
from dsv4_runtime.contract import Document

API_VERSION: Literal["dsv4.dev/v1alpha1"] = "dsv4.dev/v1alpha1"
KIND: Literal["DSV4Deployment"] = "DSV4Deployment"

LONGEST_NAME = 45
"""Names of members are made from the deployment's and must fit Kubernetes' 63 characters."""

NAME_PATTERN = "[a-z]([a-z0-9-]*[a-z0-9])?"
"""Pattern that all of a name must match."""


TAKEN_PATTERN = "-[0-9]+-(head|i[0-9]+)$"
"""Pattern of the ends of names that Services of groups have: `chat-0-head` is one of the deployment `chat`."""


def _taken(name: str) -> str:
    return (
        f"{quoted(name)} ends as the Services of another deployment's groups do; write another end than a number and "
        "head, or a number and i with a number"
    )


Name = Annotated[
    str,
    Matches(
        NAME_PATTERN, "is not a name; use lower-case letters, digits and dashes, beginning with a letter", LONGEST_NAME
    ),
]


_MOST_ANNOTATION_BYTES = 2**18
"""Bytes of the annotations of one object, which API servers bound."""


def _texts(value: Any) -> Any:
    # API servers read null as an empty text.
    return {key: "" if text is None else text for key, text in value.items()} if isinstance(value, dict) else value


def _small(annotations: dict[str, str]) -> dict[str, str]:
    size = sum(len(key.encode()) + len(text.encode()) for key, text in annotations.items())
    if size > _MOST_ANNOTATION_BYTES:
        raise ValueError(f"has {size} bytes; the most is {_MOST_ANNOTATION_BYTES}, so shorten them")
    return annotations


class Metadata(SpecPart):
    """Identity of the deployment."""

    name: Name
    """Lower-case letters, digits and dashes, at most 45; not with an end such as `-0-head` or `-0-i1`."""
    namespace: Namespace = "default"
    """The Kubernetes namespace."""
    generation: Annotated[Count, Field(ge=0)] = 1
    """Grows with every change of the specification; whoever stores the object counts it."""
    uid: str | None = None
    """Set by Kubernetes."""
    labels: Annotated[dict[LabelKey, LabelValue], BeforeValidator(_texts)] = Field(default_factory=dict)
    """Labels, for people's own use."""
    annotations: Annotated[dict[AnnotationKey, str], BeforeValidator(_texts), AfterValidator(_small)] = Field(
        default_factory=dict
    )
    """Annotations, for people's own use."""


class DSV4Deployment(Document):
    """One DeepSeek-V4 model on one or more groups of machines, kept running."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    api_version: Literal["dsv4.dev/v1alpha1"] = API_VERSION
    """`dsv4.dev/v1alpha1`."""
    kind: Literal["DSV4Deployment"] = KIND
    """`DSV4Deployment`."""
    metadata: Metadata
    """Name, namespace and labels of the deployment."""
    spec: DeploymentSpec
    """Desired state."""
    status: Annotated[DeploymentStatus, BeforeValidator(read_status)] = DeploymentStatus()
    """Observed state."""

    @model_validator(mode="after")
    def _rules(self) -> Self:
        findings = check_spec(self.spec)
        # One that exists from before this rule goes on.
        if re.search(TAKEN_PATTERN, self.metadata.name) and self.status == DeploymentStatus():
            findings = (*findings, Finding("metadata.name", _taken(self.metadata.name)))
        if findings:
            message = "; ".join(map(str, findings)).replace("{", "{{").replace("}", "}}")
            raise PydanticCustomError(RULES_ERROR, message, {"findings": findings})
        return self

    @property
    def served_names(self) -> tuple[str, ...]:
        """Return the model names that the API answers to."""
        return self.spec.model.served_names or (self.metadata.name,)
