"""Sphinx: ``make docs``. Needs no network; what is listed of probes and figures is read from the registries."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "stabilitylab"
author = "the authors of stabilitylab"
extensions = ["myst_parser", "sphinx.ext.autodoc", "registries", "reading"]
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "stabilitylab"
autodoc_typehints = "none"  # they stand in the signature
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
nitpicky = False
