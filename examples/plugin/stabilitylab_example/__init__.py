"""A plug-in for stabilitylab; its entry points name the modules."""
