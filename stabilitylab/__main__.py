"""``python -m stabilitylab``."""

from .cli import main

main()
