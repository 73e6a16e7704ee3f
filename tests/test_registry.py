from __future__ import annotations

import pytest

from stabilitylab.errors import UsageError
from stabilitylab.registry import Registry


@pytest.fixture
def registry() -> Registry[type]:
    registry: Registry[type] = Registry("architecture")
    registry.register("postln")(int)
    registry.register("postln-init")(float)
    return registry


@pytest.mark.parametrize("name", ["postln", "Post-LN", "post_ln", "POST LN"])
def test_spelling_is_forgiven(registry: Registry[type], name: str) -> None:
    assert registry[name] is int
    assert name in registry
    assert registry.resolve(name) == "postln"


def test_an_unknown_name_lists_the_choices_and_the_nearest(registry: Registry[type]) -> None:
    with pytest.raises(UsageError, match=r"unknown architecture 'postnl'; choose one of postln, postln-init.*'postln'"):
        registry["postnl"]
    assert "postnl" not in registry


def test_a_duplicate_is_refused_under_any_spelling(registry: Registry[type]) -> None:
    with pytest.raises(ValueError, match="registered already, as 'postln'"):
        registry.register("Post_LN")(str)
    assert list(registry) == ["postln", "postln-init"]
    assert len(registry) == 2
