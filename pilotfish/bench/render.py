"""Pages of one look: a template with everything in it, for light and dark screens."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2

from pilotfish.bench import svg

TEMPLATE = "page.html.jinja"


def render(package: str, **values: Any) -> str:
    """The template ``page.html.jinja`` of a package, with these values and ``style``."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = resources.files(package).joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(template).render(style=_style(), **values)


def _style() -> str:
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {svg.variables(svg.DARK)} }} }}"
    rules = resources.files("pilotfish.bench").joinpath("page.css").read_text(encoding="utf-8")
    return f":root {{ color-scheme: light dark; {svg.variables(svg.LIGHT)} }}\n{dark}\n{rules}".strip()
