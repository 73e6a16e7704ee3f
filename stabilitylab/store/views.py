"""Views of a run: pictures and texts that packages above the store make of it. They register here by name, so that
:class:`~stabilitylab.store.Run` can offer them without an import upwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..registry import Registry, Room

VIEWS: Registry[Callable[..., Any]] = Registry("view", Room("stabilitylab.reports.views", "stabilitylab.views"))
