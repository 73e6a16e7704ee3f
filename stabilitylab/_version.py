"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("stabilitylab")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
