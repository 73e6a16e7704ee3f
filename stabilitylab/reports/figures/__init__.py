"""One module a figure, or a family of figures, with the claims that it shows; importing this package registers all."""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
