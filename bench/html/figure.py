"""A picture: one pair of axes as inline SVG that follows the page's colours.

Names of arms never get into a picture, they stand beside it as HTML: no escaping, no layout that
depends on their length, and a line that wraps on paper.
"""

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.html.words import arm_name, tag, text

INK = "#010203"
"""Stands for the page's text colour, until `_inline` puts `currentColor` in its place."""
FAINT = "#010204"
"""As INK, for grids."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bench",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    # it would merge dots that stand in line; series are short enough
    "path.simplify": False,
}
# Okabe and Ito's palette, told apart by people who cannot tell red from green, without its black
# (it is the baseline's, and white on a dark page) and its yellow (unreadable on white).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("solid", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
RANK_COLOURS = (*COLOURS, "#6b3d8f", "#8a8a8a")
"""Of up to 8 ranks; more are taken from a scale."""

Line = tuple[str, Any]
"""Colour and dashes."""


def lines(arms: list[str], baseline: str) -> dict[str, Line]:
    """A colour and dashes for every arm, the same in every picture of the page."""
    others = [arm for arm in arms if arm != baseline]
    found: dict[str, Line] = {
        arm: (COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)])
        for i, arm in enumerate(others)
    }
    return {baseline: (INK, "solid"), **found}


def rank_colours(ranks: int) -> list[str]:
    if ranks <= len(RANK_COLOURS):
        return list(RANK_COLOURS[:ranks])
    scale = matplotlib.colormaps["turbo"]
    return [matplotlib.colors.to_hex(scale((i + 0.5) / ranks)) for i in range(ranks)]


class Pictures:
    """Draws; counts, so that ids inside the SVGs of one page differ."""

    def __init__(self) -> None:
        self._count = 0

    def draw(
        self, label: str, size: tuple[float, float], paint: Callable[[Axes], None], **extra: float
    ) -> str:
        """size: inches at 72 points; label: for who cannot see it; extra: margins in inches."""
        margins = {"left": 0.5, "right": 0.16, "top": 0.08, "bottom": 0.42, **extra}
        width, height = size
        buffer = io.StringIO()
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=size)
            FigureCanvasSVG(figure)
            box = (
                margins["left"] / width,
                margins["bottom"] / height,
                1 - (margins["left"] + margins["right"]) / width,
                1 - (margins["top"] + margins["bottom"]) / height,
            )
            figure.patch.set_visible(False)
            axes = figure.add_axes(box)
            axes.patch.set_visible(False)
            paint(axes)
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        self._count += 1
        return _inline(buffer.getvalue(), label, f"f{self._count}-", width)


def _inline(svg: str, label: str, prefix: str, width: float) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"| font-family: [^;"]*;', "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}", svg)
    svg = re.sub(r' (d|x|y|transform)="[^"]*"', _rounded, svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = svg.replace(INK, "currentColor").replace(FAINT, "var(--grid)")
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg {box.group() if box else ""} role="img" style="max-width: {width * 1.35:.1f}in"'
    return re.sub(r"<svg[^>]*>", f'{head} aria-label="{text(label)}">', svg, count=1)


def _rounded(attribute: re.Match[str]) -> str:
    """A tenth of a point is enough for coordinates; texts are figures and stay."""
    return re.sub(r"(\d\.\d)\d+", r"\1", attribute.group())


def swatch(line: Line) -> str:
    """A piece of the line, for a legend."""
    colour, dashes = line
    drawn = "" if dashes == "solid" else " ".join(str(2 * each) for each in dashes[1])
    stroke = tag(
        "line",
        x1="1",
        x2="33",
        y1="5",
        y2="5",
        stroke="currentColor" if colour == INK else colour,
        **{"stroke-width": "3", "stroke-dasharray": drawn},
    )
    return f'<svg class="swatch" viewBox="0 0 34 10" aria-hidden="true">{stroke}</svg>'


def legend(entries: list[tuple[Line, str, str]]) -> str:
    """entries: line, name, a remark beside it."""
    items = [
        tag("li", swatch(line), tag("span", arm_name(name)), tag("small", text(remark)))
        for line, name, remark in entries
    ]
    return tag("ul", *items, cls="legend")


def rank_legend(ranks: int) -> str:
    items = [
        tag("li", f'<i style="background: {colour}"></i>{rank}')
        for rank, colour in enumerate(rank_colours(ranks))
    ]
    return tag("ul", tag("li", "rank"), *items, cls="ranks")


def framed(title: str, *inside: str) -> str:
    return tag("figure", tag("figcaption", title), *inside)


def grid(panels: list[tuple[str, str, str]]) -> str:
    """Small pictures side by side; panels: arm, remark, picture."""
    parts = [
        tag("div", tag("b", arm_name(arm)), tag("small", text(remark)), picture)
        for arm, remark, picture in panels
    ]
    return tag("div", *parts, cls="panels")
