"""The sweep of the overload guard: a figure over `max_load_skew` and `min_load_gap`.

An arm takes part when its name gives both, as `prefix_affinity:max_load_skew=1.5:min_load_gap=4`.
"""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes

from bench.html.figure import FAINT, Pictures, framed, grid
from bench.html.series import Floats
from bench.html.words import grouped, kind_label, metric, number, text
from bench.statistics import Comparison, Metric

AXES = ("max_load_skew", "min_load_gap")
SHOWN = ("ttft_ms_mean", "ttft_ms_p99", "req_per_s", "reuse", "uncached_max_over_mean")
ENOUGH = 4
"""Arms of one family from which they are a sweep, and leave the pictures by arm."""

Point = tuple[float, float]


def family(arm: str) -> tuple[str, Point] | None:
    """The arm without the two parameters, and their values; None: it does not give both."""
    name, *given = arm.split(":")
    values: dict[str, float] = {}
    rest = [name]
    for part in given:
        key, _, value = part.partition("=")
        try:
            if key in AXES:
                values[key] = float(value)
            else:
                rest.append(part)
        except ValueError:
            return None
    if len(values) < 2:
        return None
    return ":".join(rest), (values[AXES[0]], values[AXES[1]])


def sweeps(arms: Iterable[str]) -> dict[str, dict[Point, str]]:
    """Family -> (skew, gap) -> arm, for families large enough."""
    found: dict[str, dict[Point, str]] = {}
    for arm in arms:
        member = family(arm)
        if member:
            found.setdefault(member[0], {})[member[1]] = arm
    return {name: points for name, points in found.items() if len(points) >= ENOUGH}


def sweep_plots(comparisons: list[Comparison], pictures: Pictures) -> str:
    """Heat maps, a row a workload and family; the empty string where no arms are a sweep."""
    parts = []
    for (workload, kind), arms in grouped(comparisons).items():
        by_arm = {each.arm: each for each in arms}
        for name, points in sweeps(by_arm).items():
            panels = []
            for each in SHOWN:
                values = {
                    point: figure.mean
                    for point, arm in points.items()
                    if (figure := by_arm[arm].figures[each])
                }
                if values:
                    panels.append(_panel(values, metric(each), pictures))
            title = f"{workload}, {name}: means over seeds, {kind_label(kind)}"
            parts.append((title, grid(panels)))
    return "".join(framed(text(title), inside) for title, inside in parts)


def _panel(values: dict[Point, float], which: Metric, pictures: Pictures) -> tuple[str, str, str]:
    skews = sorted({skew for skew, _ in values})
    gaps = sorted({gap for _, gap in values})
    table = np.full((len(skews), len(gaps)), np.nan)
    for (skew, gap), value in values.items():
        table[skews.index(skew), gaps.index(gap)] = value
    ends = max(values.values()), min(values.values())
    best, worst = ends if which.more_is_better else ends[::-1]
    at = [f"skew {s:g} gap {g:g}" for (s, g), value in values.items() if value == best]

    def paint(axes: Axes) -> None:
        _heat(axes, table, best, worst)
        axes.set_xticks(range(len(gaps)), [f"{gap:g}" for gap in gaps])
        axes.set_yticks(range(len(skews)), [f"{skew:g}" for skew in skews])

    remark = f"best {number(best)} {which.unit} at {at[0]}" + (" and others" if len(at) > 1 else "")
    size = (3.0, 0.7 + 0.3 * len(skews))
    return (
        which.label,
        remark,
        pictures.draw(f"{which.label} over skew and gap", size, paint, left=0.65),
    )


def _heat(
    axes: Axes,
    table: Floats,
    best: float,
    worst: float,
) -> None:
    """Dark is good; a cell says its figure. A tenth of the best is the least that spans the scale:
    else a difference of nothing would look like one of much.
    """
    span = max(abs(best - worst), abs(best) / 10) or 1.0
    goodness = 1 - np.abs(table - best) / span
    rows, columns = table.shape
    axes.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        np.ma.masked_invalid(goodness),
        cmap="Blues",
        vmin=-0.1,
        vmax=1.2,
        edgecolors=FAINT,
        linewidth=0.3,
    )
    for (down, across), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "white" if goodness[down, across] > 0.65 else "black"
            axes.text(
                across, down, number(value), color=colour, ha="center", va="center", fontsize=7
            )
    axes.set(xlabel="min_load_gap", ylabel="max_load_skew")
    axes.grid(False)
