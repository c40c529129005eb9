"""The picture of a soak: memory, descriptors, rate and who decided, over time."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.html.figure import COLOURS
from bench.soak.verdict import Row, lives
from bench.soak.world import Check, Usage

KINDS = ("sidecar", "controller", "schedulers")


def draw(rows: list[Row], checks: list[Check], path: Path) -> None:
    """Four panels over the same time, in minutes."""
    figure = Figure(figsize=(11, 10), layout="constrained")
    FigureCanvasAgg(figure)
    memory, files, rate, dispatch = figure.subplots(4, 1, sharex=True)
    _of_processes(memory, rows, lambda usage: usage.mib)
    memory.set(ylabel="resident memory, MiB", ylim=(0, None))
    _of_processes(files, rows, lambda usage: usage.descriptors)
    files.set(ylabel="descriptors", ylim=(0, None))
    _rates(rate, rows, checks)
    _dispatches(dispatch, rows)
    dispatch.set(xlabel="minutes")
    for axes in (memory, files, rate, dispatch):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _of_processes(axes: Axes, rows: list[Row], pick: Callable[[Usage], float]) -> None:
    """A line for each incarnation, a colour for each kind of process."""
    named = set()
    for name, each in lives(rows).items():
        kind = name.split()[0]
        axes.plot(
            [row.at / 60 for row in each],
            [pick(row.usage[name]) for row in each],
            color=COLOURS[KINDS.index(kind)],
            linewidth=1.4,
            marker="." if len(each) < 3 else None,
            label=None if kind in named else kind,
        )
        named.add(kind)
    _legend(axes)


def _rates(axes: Axes, rows: list[Row], checks: list[Check]) -> None:
    minutes = [row.at / 60 for row in rows]
    axes.plot(minutes, [row.rate for row in rows], color=COLOURS[0], label="requests a second")
    axes.set(ylabel="requests a second", ylim=(0, None))
    for exact, marker, colour in ((True, "|", COLOURS[2]), (False, "x", COLOURS[1])):
        found = [check.at / 60 for check in checks if (check.drift == 0) is exact]
        label = "load view exact" if exact else "load view off"
        if found:
            axes.plot(found, [0] * len(found), marker, color=colour, label=label, markersize=9)
    _legend(axes)


def _dispatches(axes: Axes, rows: list[Row]) -> None:
    """The slowest dispatch of each sample, and the share that the hook decided alone."""
    minutes = [row.at / 60 for row in rows]
    longest = [row.told["longest_ms"] for row in rows]
    axes.plot(minutes, longest, color=COLOURS[3], label="slowest dispatch, ms")
    axes.set(ylabel="milliseconds", ylim=(0, None))
    shares = axes.twinx()
    shares.plot(minutes[1:], _alone(rows), color=COLOURS[4], label="decided by the hook alone, %")
    shares.set(ylabel="percent", ylim=(0, None))
    shares.spines["top"].set_visible(False)
    _legend(axes, shares)


def _legend(*pair: Axes) -> None:
    """Above the axes, where it hides nothing."""
    lines = [line for axes in pair for line in axes.get_lines()]
    named = [line for line in lines if not str(line.get_label()).startswith("_")]
    labels = [str(line.get_label()) for line in named]
    where: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1)}
    pair[0].legend(named, labels, ncols=len(named), frameon=False, **where)


def _alone(rows: list[Row]) -> list[float]:
    """Percent of the requests between two samples."""
    shares = []
    for before, after in pairwise(rows):
        old, new = before.told, after.told
        if new["asked"] < old["asked"]:  # another controller
            old = {"asked": 0, "bypassed": {}}
        alone = sum(new["bypassed"].values()) - sum(old["bypassed"].values())
        shares.append(100 * alone / max(1, new["asked"] - old["asked"]))
    return shares
