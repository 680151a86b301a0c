"""Offers of `dsv4 init`: published settings, and plans that are accepted as written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_operator.api import Severity, parse
from dsv4_operator.planning.catalog import machine_named
from dsv4_operator.planning.facts import catalog_facts
from dsv4_operator.planning.memory import FitVerdict
from dsv4_operator.planning.offers import PUBLISHED, USERS, Offer, document, offers
from dsv4_operator.planning.rules import broken_rules
from dsv4_operator.planning.setup import Setup, setup

DOCS = Path(__file__).parents[3] / "docs"
GROUPS = [
    ("gb10", 2, 1), ("gb10", 3, 1), ("gb10", 4, 1), ("gb10", 8, 1), ("rtx-pro-6000-workstation", 1, 2),
    ("rtx-pro-6000-max-q", 1, 4), ("rtx-pro-6000-server", 1, 8), ("h100", 1, 4),
]  # fmt: skip


def planned(offer: Offer, users: int, context: int) -> Setup:
    made = parse(document("a", offer, {"path": f"/models/{offer.model.name}"}, users=users, context=context))
    return setup(made, catalog_facts(made, offer.machine, state_root="/s", weights_root="/w"))


@pytest.mark.parametrize(("kind", "nodes", "devices"), GROUPS)
def test_every_offer_is_accepted_as_written_and_has_published_settings(kind: str, nodes: int, devices: int) -> None:
    found = offers(machine_named(kind), nodes, devices)
    assert found
    for offer in found:
        # Contexts above this one are planned with all users; the one for fewer users is the default of `dsv4 init`.
        chosen = planned(offer, USERS[0], offer.context)
        assert chosen.memory.verdict is FitVerdict.FITS
        assert [one for one in broken_rules(chosen) if one.severity is Severity.REFUSE] == []
        engine, drafts = chosen.spec.engine, offer.engine.get("speculative", {})
        assert (offer.published is None) is (kind == "h100")
        if offer.published is not None:
            assert (engine.executor, chosen.draft_tokens > 0) == ("MP", offer.drafts and bool(offer.model.speculative))
            assert engine.gpu_memory_utilization == offer.published.utilization
            assert drafts.get("tokens", 5) in ((3, 5) if kind.startswith("rtx") else (5,))
        roce = chosen.profile.name == "spark-b12x" and nodes > 1
        assert any(one.name == "VLLM_ENABLE_ROCE_ALLREDUCE" for one in engine.env) is roce


def test_drafts_that_do_not_fit_are_left_out() -> None:
    """With this build, V4-Flash-0731-NVFP4 with its draft layers needs more memory than two RTX PRO 6000 have."""
    found = offers(machine_named("rtx-pro-6000-workstation"), 1, 2)
    assert {offer.drafts for offer in found} == {True, False}
    for offer in found:
        assert ("speculative" in offer.engine) is (offer.drafts and offer.model.speculative is not None)


def test_the_page_names_the_source_of_every_setting() -> None:
    page = (DOCS / "planning.md").read_text()
    for row in PUBLISHED:
        assert f"| {row.source} ({row.date}) |" in page
        assert not row.speed or row.speed in page
