"""Figures as SVG whose colours are CSS variables, so that one drawing suits light and dark screens."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pilotfish.errors import FailedPreconditionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Report = TypeVar("Report")

LIGHT = {
    "paper": "#fbfbf9", "card": "#ffffff", "ink": "#1c2733", "soft": "#5b6875", "faint": "#c9d0d6", "line": "#e4e7ea",
    "accent": "#0b7285", "series-1": "#5f7383", "series-2": "#0c8599", "series-3": "#e8590c", "series-4": "#7048a8",
    "series-5": "#2b8a3e", "series-6": "#c2255c",
}  # fmt: skip
DARK = {
    "paper": "#12181e", "card": "#19222a", "ink": "#e3e9ee", "soft": "#9aa8b4", "faint": "#46535f", "line": "#2a3640",
    "accent": "#3bc9db", "series-1": "#91a3b0", "series-2": "#22b8cf", "series-3": "#ff922b", "series-4": "#b197fc",
    "series-5": "#69db7c", "series-6": "#f783ac",
}  # fmt: skip

# Colours that stand for variables while matplotlib draws.
INK, FAINT = "#010101", "#020202"
SERIES = ("#030301", "#030302", "#030303", "#030304", "#030305", "#030306")
_VARIABLES = {INK: "ink", FAINT: "faint"} | {colour: f"series-{i}" for i, colour in enumerate(SERIES, start=1)}

WIDTH = 8.6  # inches; whoever shows a figure scales it


@dataclass(frozen=True)
class Shape:
    """How wide a figure is, in inches, and how many panels and entries of its legend it has beside one another."""

    name: str
    width: float
    columns: int
    legend: int

    @property
    def is_narrow(self) -> bool:
        return self is NARROW


WIDE = Shape("wide", WIDTH, 4, 6)
NARROW = Shape("narrow", 4.4, 1, 3)
"""For phones, on which a wide one would be half as large, and its type too small to read."""

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def require_matplotlib(flag: str) -> None:
    """Returns if figures can be drawn; asked before hours are measured for them.

    Args:
        flag: that wants them.

    Raises:
        FailedPreconditionError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FailedPreconditionError(
            f"plots need matplotlib; install it with `pip install 'pilotfish[bench]'`, or leave {flag} out"
        ) from error


@dataclass(frozen=True)
class Plot:
    """A figure of a page."""

    title: str
    note: str
    shapes: tuple[str, ...]
    """As SVG: for desks and for phones; a page shows one of them."""


def plots(report: Report, figures: Sequence[tuple[str, str, Callable[[Report, Shape], Figure | None]]]) -> list[Plot]:
    """Those that the report has something for.

    Args:
        report: of any kind.
        figures: title, note, and what draws it or finds nothing to draw.
    """
    found = []
    for title, note, draw in figures:
        shapes = []
        for shape in (WIDE, NARROW):
            with style(f"{title}, {shape.name}"):
                if (figure := draw(report, shape)) is not None:
                    shapes.append(inline(figure, title, shape.name))
        if shapes:
            found.append(Plot(title, note, tuple(shapes)))
    return found


def style(title: str) -> Any:
    """The context to draw a figure and to make it SVG in; figures of one page must differ in their titles."""
    import matplotlib as mpl

    return mpl.rc_context(_STYLE | {"svg.hashsalt": title})  # the ids inside an SVG are made from the salt


def inline(figure: Figure, title: str, kind: str = "") -> str:
    """The figure as an element, of that class, of a page that defines the colours as variables."""
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = written.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # names that nothing refers to, and that every figure has
    for size in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for colour, name in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    of_kind = f' class="{kind}"' if kind else ""
    return svg.replace("<svg", f'<svg{of_kind} role="img" aria-label="{title}"', 1)


def standalone(figure: Figure, title: str) -> str:
    """The figure as a file of its own."""
    rules = f"svg {{ {variables(LIGHT)} font-family: system-ui, sans-serif; }}"
    rules += f" @media (prefers-color-scheme: dark) {{ svg {{ {variables(DARK)} }} }}"
    return re.sub(r"(<svg[^>]*>)", rf"\1<style>{rules}</style>", inline(figure, title), count=1)


def variables(palette: dict[str, str]) -> str:
    """A palette as CSS."""
    return " ".join(f"--{name}: {colour};" for name, colour in palette.items())
