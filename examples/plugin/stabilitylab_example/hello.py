"""A command."""

from stabilitylab.commands import command


@command("hello")
def hello(name: str = "world") -> None:
    """Say hello, to show that a plug-in may add a command."""
    print(f"hello, {name}")
