"""Thresholds by which a member's agent calls an engine suspect or dead. Times in seconds.

The defaults hold for engines whose steps take from milliseconds to seconds: the bound on a step that does not end is
learned from the engine's own steps, between `stall_min` and `stall_max`.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from dsv4_runtime.contract.base import Document


class HealthPolicy(Document):
    """The thresholds of `dsv4_runtime.health.rules`."""

    gpus: bool = True
    """Whether the engine computes on GPUs: what they do is its life then, and what processors do is not."""
    stopped: float = Field(default=2.0, gt=0)
    """A process that somebody stopped (SIGSTOP) for this long is hung."""
    stall_min: float = Field(default=2.5, gt=0)
    """Without any sign of life no step may take less than this and be called hung."""
    stall_max: float = Field(default=60.0, gt=0)
    stall_factor: float = Field(default=4.0, ge=1)
    """In between, so many times the engine's slow (95th percentile) steps are allowed."""
    stall_round_trips: float = Field(default=50.0, ge=0)
    """And at least so many round trips between the members: a step makes many, and the link may have become slow."""
    busy_max: float = Field(default=90.0, gt=0)
    """An engine that is visibly busy may take this long for a step: compilation, autotuning."""
    life_share: float = Field(default=0.1, gt=0, le=1)
    """A process that uses at least this share of a core is alive."""
    canary_patience: float = Field(default=1.5, gt=0)
    """A canary that has waited less than this says nothing."""
    canary_min: float = Field(default=3.0, gt=0)
    """Between canaries of an idle engine, at least."""
    canary_max: float = Field(default=30.0, gt=0)
    """Between canaries, at most; this is the pace while steps prove that the engine works."""
    canary_load: float = Field(default=0.1, gt=0, le=1)
    """Share of an idle engine's time that canaries may take."""
    answer_tolerance: float = Field(default=0.5, gt=0)
    """Nats by which the log probabilities of the known answer may differ from start to start. The default leaves room
    for accelerators, on which the order of sums may be another one in each start."""
    api_silent: float = Field(default=4.0, gt=0)
    """An API process that answers nothing for so long, and does nothing either, is hung."""
    link_suspect: float = Field(default=2.0, gt=0)
    """A member that was not heard for this long makes the engine suspect."""
    link_lost: float = Field(default=9.0, gt=0)
    """A member that was not heard for this long is lost: a second less than everybody shall know of it."""
    agent_silent: float = Field(default=4.0, gt=0)
    """An agent that was not heard for this long, although its machine takes connections for half of it, is hung."""
    link_recover: float = Field(default=3.0, ge=0)
    """After a silence that ended, an engine has as long as the silence took and this for its connections to recover."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ordered = ("stall_min", "stall_max"), ("canary_min", "canary_max"), ("link_suspect", "link_lost")
        for low, high in (*ordered, ("agent_silent", "link_lost")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low)} is more than {high} {getattr(self, high)}; lower it")
        return self
