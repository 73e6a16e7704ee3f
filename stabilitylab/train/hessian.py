"""The removal of Hessian probes from a run whose backward pass is not the gradient of its loss."""

from __future__ import annotations

import logging

from ..config import Config
from ..errors import UsageError
from ..models.base import inexact
from ..probes import chosen

log = logging.getLogger(__name__)
NEEDS = ("sharpness", "preconditioned_sharpness")  # critical_sharpness takes losses alone


def unmeasured(config: Config) -> dict[str, str]:
    """Return the probes :data:`NEEDS` that are asked for and cannot be computed, each with the reason.

    The Hessian cannot be computed if an architecture detaches a part of the forward pass. Raises UsageError if the user
    named one of the probes.
    """
    archs, asked = inexact(config.model), chosen(config.probes.names)
    found = [name for name in NEEDS if name in asked] if archs else []
    if not found:
        return {}
    why = f"{archs[0]} detaches a part of its forward pass, so that its backward pass is not the gradient of the loss"
    if named := [name for name in found if asked[name]]:
        raise UsageError(f"probe {named[0]!r} needs a Hessian, and {why}: leave the probe out.")
    return dict.fromkeys(found, why)


def say_unmeasured(config: Config) -> None:
    """Log which probes :func:`unmeasured` leaves out. Raises UsageError if the user named one of them."""
    if found := unmeasured(config):
        log.warning("not measured: %s (%s).", ", ".join(found), next(iter(found.values())))


def without_hessian(config: Config) -> Config:
    """Return the configuration without the probes that :func:`unmeasured` leaves out."""
    found = unmeasured(config)
    return (
        config.changed(probes={"names": (*config.probes.names, *(f"-{name}" for name in found))}) if found else config
    )
