"""What diagnose may say of a run of the default recipe, whatever its depth."""

from __future__ import annotations

from typing import Any


def assert_nothing_is_wrong(facts: dict[str, Any]) -> None:
    """It reads its source, and nothing is open at its end."""
    assert facts["verdict"] == "healthy", facts["paragraph"]
    assert_no_accusation(facts)


def assert_nothing_is_wrong_so_far(facts: dict[str, Any]) -> None:
    """A part of its updates, each of which is as it should be; whether it learns is too early to say."""
    assert facts["verdict"] == "open", facts["verdict"]
    assert "descending" in facts["paragraph"], facts["paragraph"]
    assert_no_accusation(facts)


def assert_no_accusation(facts: dict[str, Any]) -> None:
    assert {event["severity"] for event in facts["events"]} <= {"note"}, facts["events"]
    kinds = {event["kind"] for event in facts["events"]}
    pass_later = {"rank_collapse", "constant_encoder", "ignored_source"}
    assert kinds <= {"vanishing_gradient", *pass_later}, "diagnose accuses a run of the default recipe"
