"""A forked child of the test's own process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable


def fork() -> int:
    """``os.fork`` without the warning of later Pythons about threads, which the children here do not use."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return os.fork()


def in_a_fork(*acts: Callable[[], object]) -> list[str]:
    """Do each act in one forked child, which then goes; return what each raised, "" for nothing."""
    told, tell = os.pipe()
    if not (child := fork()):
        said = []
        for act in acts:
            try:
                act()
                said.append("")
            except BaseException as error:
                said.append(f"{type(error).__name__}: {error}")
        os.write(tell, "\n".join(said).encode())
        os._exit(0)
    os.close(tell)
    os.waitpid(child, 0)
    with os.fdopen(told, "rb") as stream:
        return stream.read().decode().split("\n")
