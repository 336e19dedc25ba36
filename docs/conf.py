"""The site, by `make docs`: these pages, and an API reference from the docstrings."""

from importlib import metadata

project = "onebit-jax"
author = "the authors of onebit-jax"
release = metadata.version(project)
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = project
exclude_patterns = ["_build"]
default_role = "py:obj"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say shapes and dtypes, too
toc_object_entries_show_parents = "hide"
napoleon_use_ivar = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
