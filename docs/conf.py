"""The site, by `make docs`: these pages, and an API reference from the docstrings."""

from importlib import metadata

from docutils import nodes
from latex2mathml.converter import convert

project = "onebit-jax"
author = copyright = "the authors of onebit-jax"
release = metadata.version(project)
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["formulas.css"]
exclude_patterns = ["_build"]
default_role = "py:obj"
html_math_renderer = "mathml"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say shapes and dtypes, too
toc_object_entries_show_parents = "hide"
napoleon_use_ivar = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3


def inline(translator, node):
    """Writes a formula as MathML, which browsers draw without a script or a network."""
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block(translator, node):
    """Writes a formula on lines of its own, aligned at its ampersands."""
    formula = node.astext()
    if "&" in formula:
        formula = rf"\begin{{align*}}{formula}\end{{align*}}"
    mathml = convert(formula, display="block")
    translator.body.append(f'<div class="formula">{mathml}</div>')
    raise nodes.SkipNode


def setup(app):
    """Adds the renderer of formulas."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
