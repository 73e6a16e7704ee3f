"""The options of a watcher stand once: keywords have the names, types and defaults of the dataclass."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError

import pytest
from probe_toys import ListSink, Toy

from stabilitylab.api import watch
from stabilitylab.errors import UsageError
from stabilitylab.probes import Watcher, WatchOptions

OWN = {"total_every_step", "recorder", "measured", "stateless", "tapped"}  # of a watcher alone
OTHER = {"reference": "first batch", "update_every": None}  # watch()'s own defaults


def test_a_watcher_takes_each_option_as_a_keyword() -> None:
    options = inspect.signature(WatchOptions).parameters
    taken = inspect.signature(Watcher).parameters
    assert {name: taken[name] for name in options} == dict(options)
    assert [name for name in taken if name not in options] == ["model", "sink"]


def test_watch_has_the_same_names_types_and_defaults() -> None:
    options, taken = inspect.signature(WatchOptions).parameters, inspect.signature(watch).parameters
    for name, option in options.items():
        if name in OWN:
            assert name not in taken, f"watch() takes {name}"
            continue
        assert taken[name].default == OTHER.get(name, option.default), f"watch() has another default of {name}"
        if name not in OTHER:
            assert taken[name].annotation == option.annotation, f"watch() has another type of {name}"


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="evry"):
        Watcher(Toy(), ListSink(), evry=3)  # type: ignore[call-arg]


def test_options_are_checked_and_stay_as_they_are() -> None:
    with pytest.raises(UsageError, match="curvature_batch = 'none' must be 'fixed' or 'update'"):
        WatchOptions(curvature_batch="none")  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        WatchOptions().every = 3  # type: ignore[misc]
    assert WatchOptions(every=3).keywords()["every"] == 3
