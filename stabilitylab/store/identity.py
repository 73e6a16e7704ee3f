"""The identity of a run: a random id in run.json and in every other file that the run writes."""

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
    """The id of a run: 32 hexadecimal digits; "" in runs of schema 3 and before, whose files are not checked.

    ``since``: the number of the first part that names its run. It is above 1 in a run that an older version began.
    """

    run_id: str = ""
    since: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Return the entries of run.json."""
        return dict(zip(OWN_KEYS, self, strict=True))

    def owns(self, run_id: str | None, number: int) -> bool:
        """True if the part or journal ``number`` that names ``run_id`` (None: no run) may be this run's."""
        return not self.run_id or (number < self.since if run_id is None else run_id == self.run_id)


def new_identity() -> Identity:
    """Return a new id, drawn from the operating system, so that no random generator of a training advances."""
    return Identity(uuid4().hex)


def later_identity(run_json: bytes, since: int) -> Identity:
    """Return the id of a run that an older version began. It depends on run.json alone, so that a resume that is
    repeated after a crash finds the same id."""
    return Identity(sha256(run_json).hexdigest()[:32], since)


def identity_of(document: Mapping[str, Any]) -> Identity:
    """Return the id in run.json. Raises ValueError if the schema needs an id and run.json has none."""
    if document["schema_version"] < IDENTIFIED:
        return Identity()
    run_id, since = (document.get(key) for key in OWN_KEYS)
    if not isinstance(run_id, str) or not ID.fullmatch(run_id):
        raise ValueError("run_id is no id of a run")
    if not isinstance(since, int) or isinstance(since, bool) or not 1 <= since < 2**31:
        raise ValueError("run_id_since is no number of a part")
    return Identity(run_id, since)
