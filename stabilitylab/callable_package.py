"""A package that is the function of its name too, as ``stabilitylab.explain`` is.

Python binds a package that was imported to its name in the package above, and would hide a function of that name there.
Therefore the package itself can be called.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def make_callable(package: str, module: str) -> None:
    """Make an imported package callable: a call goes to the function of the package's last name in its ``module``,
    which is imported at the first call."""

    def function() -> Any:
        return getattr(import_module(f"{package}.{module}"), package.rpartition(".")[2])

    class CallablePackage(ModuleType):
        def __call__(self, *args: Any, **options: Any) -> Any:
            return function()(*args, **options)

        @property
        def __doc__(self) -> str:  # type: ignore[override]
            called = function()
            told = f"{called.__name__}{inspect.signature(called)}\n\n{inspect.getdoc(called)}"
            return f"{self.__dict__['__doc__']}\n\n{told}"

        @property
        def __signature__(self) -> inspect.Signature:
            return inspect.signature(function())

    sys.modules[package].__class__ = CallablePackage
