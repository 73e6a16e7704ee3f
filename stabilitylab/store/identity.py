"""Which run a file belongs to: a random id that stands in run.json and in everything else that the run writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import uuid4

IDENTIFIED = 4  # the first schema with a run's id, and with checksums in JSON files
ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
OWN_KEYS = ("run_id", "run_id_since")  # of run.json


class Identity(NamedTuple):
    """The id of a run: 32 hexadecimal digits, "" in runs of schema 3 and before, of which nothing is checked.

    ``since``: the number of the first part that names its run. It is above 1 in a run that an older version began.
    """

    run_id: str = ""
    since: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Return the entries of run.json."""
        return dict(zip(OWN_KEYS, self, strict=True))

    def owns(self, run_id: str | None, number: int) -> bool:
        """Return True if the part or journal ``number`` that names ``run_id`` (None: no run) may be this run's."""
        return not self.run_id or (number < self.since if run_id is None else run_id == self.run_id)


def new_identity() -> Identity:
    """Return an id that no other run has; drawn from the operating system, so that no generator of a training moves."""
    return Identity(uuid4().hex)


def later_identity(run_json: bytes, since: int) -> Identity:
    """Return the id of a run that an older version began: a resume that died and is done again finds the same one."""
    return Identity(sha256(run_json).hexdigest()[:32], since)


def identity_of(document: Mapping[str, Any]) -> Identity:
    """Return the id that run.json holds. Raises ValueError where it has none and should."""
    if document["schema_version"] < IDENTIFIED:
        return Identity()
    run_id, since = (document.get(key) for key in OWN_KEYS)
    if not isinstance(run_id, str) or not ID.fullmatch(run_id):
        raise ValueError("run_id is no id of a run")
    if not isinstance(since, int) or isinstance(since, bool) or not 1 <= since < 2**31:
        raise ValueError("run_id_since is no number of a part")
    return Identity(run_id, since)
