"""The pictures of one workload: what each arm did to latencies, load, caches and sessions."""

from typing import Any

import msgspec
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes

from bench.html.figure import (
    FAINT,
    INK,
    Line,
    Pictures,
    framed,
    grid,
    legend,
    rank_colours,
    rank_legend,
)
from bench.html.series import Floats, Ints, Series, cached_share, sessions, spill_matrix
from bench.html.words import duration

WIDE = (6.4, 3.0)
SMALL = (3.0, 1.7)
POINTS = 4000
"""Requests drawn in the pictures of sessions, over all arms of a workload."""
QUANTILES = 300
"""Points of a distribution function: more than the picture has steps."""
SESSIONS = 48
"""Lines in a picture of sessions: more cannot be told apart."""


class Arms(msgspec.Struct):
    """One workload: arm -> its runs, ascending by seed; the arms' lines; who draws."""

    runs: dict[str, list[Series]]
    lines: dict[str, Line]
    pictures: Pictures

    def first(self, arm: str) -> Series:
        """The run of the lowest seed, which pictures over time show."""
        return self.runs[arm][0]


def plots(arms: Arms) -> str:
    """Every picture that has something to show."""
    parts = (ttft(arms), load(arms), cached(arms), ranks_of_sessions(arms), spills(arms))
    return "".join(parts)


def ttft(arms: Arms) -> str:
    """Distribution of TTFT, all seeds; the legend goes from the fastest median down."""
    values = {
        arm: np.concatenate([each.ttft_ms for each in runs]) for arm, runs in arms.runs.items()
    }
    values = {arm: each for arm, each in values.items() if len(each)}
    if not values:
        return ""
    shares = np.linspace(0, 1, QUANTILES)

    def paint(axes: Axes) -> None:
        for arm, each in values.items():
            colour, dashes = arms.lines[arm]
            points = np.maximum(np.quantile(each, shares), 0.01)
            axes.plot(points, shares, color=colour, linestyle=dashes, linewidth=1.6)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0), numticks=12))
        axes.xaxis.set_major_formatter(lambda value, _: duration(value))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1))
        axes.set(ylim=(0, 1), xlabel="time to first token", ylabel="share of requests")

    entries = sorted((float(np.median(each)), arm) for arm, each in values.items())
    named = [(arms.lines[arm], arm, f"median {duration(median)}") for median, arm in entries]
    picture = arms.pictures.draw("Distribution of the time to first token by arm", WIDE, paint)
    return framed(
        "Time to first token: share of requests answered within it, all seeds",
        _beside(picture, legend(named)),
    )


def load(arms: Arms) -> str:
    """Requests of each rank over time, a panel an arm, on the same axes."""
    known = {arm: arms.first(arm) for arm in arms.runs if len(arms.first(arm).load)}
    if not known:
        return ""
    top = max(float(each.load.max()) for each in known.values()) * 1.05 or 1.0
    end = max(float(each.load_at[-1]) for each in known.values())
    panels = []
    for arm, series in known.items():
        mean = float(series.load.mean())
        apart = float((series.load.max(axis=1) - series.load.min(axis=1)).mean())
        remark = f"mean {mean:.1f}, most loaded − least loaded {apart:.1f}"  # noqa: RUF001

        def paint(axes: Axes, series: Series = series) -> None:
            for line, colour in zip(series.load.T, rank_colours(series.load.shape[1]), strict=True):
                axes.plot(series.load_at, line, color=colour, linewidth=0.8)
            axes.set(ylim=(0, top), xlabel="seconds", ylabel="requests")
            _from_zero(axes, end)

        panels.append((arm, remark, arms.pictures.draw("Requests of each rank", SMALL, paint)))
    ranks = max(each.load.shape[1] for each in known.values())
    title = "Load of each rank over time: running + waiting requests, first seed"
    return framed(title, rank_legend(ranks), grid(panels))


def cached(arms: Arms) -> str:
    """Cached share of the prompt tokens over time, all seeds."""
    curves = {arm: cached_share(runs) for arm, runs in arms.runs.items()}
    curves = {arm: curve for arm, curve in curves.items() if len(curve[0])}
    if not curves:
        return ""

    def paint(axes: Axes) -> None:
        for arm, (at, share) in curves.items():
            colour, dashes = arms.lines[arm]
            axes.plot(at, share, color=colour, linestyle=dashes, linewidth=1.6)
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1))
        axes.set(ylim=(0, 1), xlabel="seconds, when the request was sent", ylabel="cached share")
        axes.set_xlim(left=0)

    overall = {arm: _reuse(runs) for arm, runs in arms.runs.items()}
    order = sorted(curves, key=lambda arm: -overall[arm])
    named = [(arms.lines[arm], arm, f"{overall[arm]:.1%} in all") for arm in order]
    picture = arms.pictures.draw("Cached share of prompt tokens over time by arm", WIDE, paint)
    return framed(
        "Cached share of the prompt tokens over time, all seeds", _beside(picture, legend(named))
    )


def _reuse(runs: list[Series]) -> float:
    prompt = sum(int(each.prompt[each.cached >= 0].sum()) for each in runs)
    return sum(int(each.cached[each.cached >= 0].sum()) for each in runs) / max(1, prompt)


def ranks_of_sessions(arms: Arms) -> str:
    """A dot a request, coloured by rank: a line of one colour is a session that stayed."""
    points = POINTS // max(1, len(arms.runs))
    drawn = {arm: sessions(arms.first(arm), SESSIONS, points) for arm in arms.runs}
    drawn = {arm: each for arm, each in drawn.items() if len(each["at"])}
    if not drawn:
        return ""
    end = max(float(each["at"].max()) for each in drawn.values())
    panels = []
    for arm, each in drawn.items():
        colours = rank_colours(arms.first(arm).run.ranks)

        def paint(axes: Axes, each: dict[str, Any] = each, colours: list[str] = colours) -> None:
            for rank, colour in enumerate(colours):
                mine = each["rank"] == rank
                _dots(axes, each["at"][mine], each["line"][mine], colour)
            axes.set(ylim=(-1, each["shown"]), xlabel="seconds", ylabel="session")
            axes.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
            axes.grid(False)
            _from_zero(axes, end)

        remark = f"{each['shown']} of {each['all']} sessions"
        panels.append((arm, remark, arms.pictures.draw("Ranks of sessions", (3.0, 2.1), paint)))
    ranks = max(arms.first(arm).run.ranks for arm in drawn)
    title = "Rank of each session over time: a dot a request, first seed"
    return framed(title, rank_legend(ranks), grid(panels))


def _dots(axes: Axes, x: Floats, y: Ints, colour: str) -> None:
    """Dots as one path of lines without length and with round ends: a third of the SVG's size."""
    if len(x):
        gap = np.full(len(x), np.nan)
        path = np.stack([x, x, gap]).T.ravel(), np.stack([y, y, gap]).T.ravel()
        axes.plot(*path, color=colour, linewidth=2.6, solid_capstyle="round")


def spills(arms: Arms) -> str:
    """Preferred against chosen rank, for arms that say which rank they preferred."""
    matrices = {arm: spill_matrix(runs) for arm, runs in arms.runs.items()}
    panels = []
    for arm, matrix in matrices.items():
        if not len(matrix):
            continue
        away = 1 - float(np.trace(matrix)) / float(matrix.sum())

        def paint(axes: Axes, matrix: Ints = matrix) -> None:
            _heat(axes, matrix)

        remark = f"{away:.1%} of {int(matrix.sum()):,} requests off the preferred rank"
        picture = arms.pictures.draw("Preferred against chosen rank", (3.0, 2.6), paint)
        panels.append((arm, remark, picture))
    if not panels:
        return ""
    title = "Spills: preferred rank (down) against chosen rank (across), requests of all seeds"
    return framed(title, grid(panels))


def _heat(axes: Axes, matrix: Ints) -> None:
    """Colour by the logarithm: the diagonal would hide everything else."""
    ranks = len(matrix)
    shade = np.ma.masked_equal(np.log1p(matrix), 0)
    edges = np.arange(ranks + 1) - 0.5
    top = float(shade.max())
    axes.pcolormesh(
        edges, edges, shade, cmap="Blues", vmin=-1, vmax=top * 1.1, edgecolors=FAINT, linewidth=0.3
    )
    if ranks <= 16:
        _counts(axes, matrix, dark=0.62 * top, size=7 if ranks <= 8 else 4)
    axes.set(xlabel="chosen rank", ylabel="preferred rank")
    axes.invert_yaxis()
    axes.grid(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(min(ranks, 8), integer=True))


def _counts(axes: Axes, matrix: Ints, dark: float, size: float) -> None:
    for (down, across), count in np.ndenumerate(matrix):
        colour = "white" if np.log1p(count) > dark else "black" if count else INK
        label = str(count) if count else "·"
        axes.text(across, down, label, color=colour, ha="center", va="center", fontsize=size)


def _from_zero(axes: Axes, end: float) -> None:
    axes.set_xlim(0, end or 1.0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(4, integer=True))


def _beside(picture: str, names: str) -> str:
    return f'<div class="beside">{picture}{names}</div>'
