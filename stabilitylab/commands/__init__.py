"""The subcommands of ``stabilitylab``, one a file; heavy imports wait until a subcommand runs."""

from .base import COMMANDS, EXIT_CODES, REPLACED, Command, command

__all__ = ["COMMANDS", "EXIT_CODES", "REPLACED", "Command", "command"]
