"""Configuration of the documentation: ``python -m sphinx -W docs docs/_build``."""

import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import lightning_accel  # noqa: E402

for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):
    shutil.copy2(notebook, HERE / "tutorials")

project = "lightning_accel"
author = "the authors of lightning_accel"
copyright = author
version = release = lightning_accel.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    "api_pages",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!lightning_accel\.).*"),  # names of others are links where their sites are asked
    ("py:.*", r"lightning_accel\.\w+\.[a-z_]+\..*"),  # of modules, from which nothing is to be imported
]
if "LINK_OTHERS" in os.environ:  # without a network, their inventories would be errors
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
        "torchmetrics": ("https://lightning.ai/docs/torchmetrics/stable", None),
        "torch_geometric": ("https://pytorch-geometric.readthedocs.io/en/latest", None),
    }

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # a test executes the notebooks, and compares what is stored in them
nb_merge_streams = True

autodoc_inherit_docstrings = False  # a hook of Lightning's is shown where we say more of it than Lightning does
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # a signature with <class ...> cannot be parsed, and stands on one line
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
napoleon_numpy_docstring = False
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "lightning_accel"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "lightning_accel"},
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"index": [], "start": [], "changelog": []}
