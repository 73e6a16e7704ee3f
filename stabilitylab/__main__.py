"""``python -m stabilitylab``."""

from .cli import main

if __name__ == "__main__":  # processes that a report starts import this module, too
    main()
