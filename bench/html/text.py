"""The comparisons as a table for the terminal."""

from bench.html.words import best, good_or_bad, grouped, kind_label, metric, number
from bench.statistics import Comparison, Difference

COLUMNS = (
    ("req_per_s", "req/s"),
    ("goodput_per_s", "goodput/s"),
    ("ttft_ms_mean", "TTFT ms"),
    ("ttft_ms_p50", "p50"),
    ("ttft_ms_p99", "p99"),
    ("e2e_ms_mean", "E2E ms"),
    ("tpot_ms_mean", "TPOT ms"),
    ("reuse", "reuse"),
    ("uncached_max_over_mean", "max/mean"),
    ("idle_share", "idle"),
)
SIGNS = {"better": "+", "worse": "-", "same": "=", "unknown": " "}
EXPLAINED = (
    "+ better, - worse, = no difference than/from the arm that the column TTFT / ... names: 95 % "
    "intervals over seeds of the\npaired difference and of the ratio; * best mean of the arms that "
    "a server can run, and different by that rule.\nTTFT/E2E/TPOT: means, and p50, p99 of TTFT. "
    "Words: docs/bench.md."
)


def text_table(comparisons: list[Comparison]) -> str:
    """A table a workload; the empty string where there is nothing."""
    parts = [
        f"{workload}  {kind_label(kind)}, {_seeds(arms)}\n{_table(arms)}"
        for (workload, kind), arms in grouped(comparisons).items()
    ]
    if parts:
        parts.append(EXPLAINED)
    return "\n\n".join(parts)


def _seeds(arms: list[Comparison]) -> str:
    most = max(len(each.seeds) for each in arms)
    return f"{most} seed{'s' if most != 1 else ''}"


def _table(arms: list[Comparison]) -> str:
    against = arms[0].baseline
    heads = ["arm", *(label for _, label in COLUMNS), f"TTFT / {against}'s", "failed"]
    rows = [heads, *([each.arm, *_cells(each, arms)] for each in arms)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _cells(arm: Comparison, arms: list[Comparison]) -> list[str]:
    cells = []
    for name, _ in COLUMNS:
        figure, each = arm.figures[name], metric(name)
        difference = figure.difference if figure else None
        star = "*" if best(arms, each) == arm.arm else " "
        mean = number(figure.mean) if figure else "-"
        cells.append(f"{mean}{SIGNS[good_or_bad(difference, each)]}{star}")
    ttft = arm.figures["ttft_ms_mean"]
    cells.append(_ratio(ttft.difference if ttft else None))
    cells.append(number(arm.counts["failed"]))
    return cells


def _ratio(difference: Difference | None) -> str:
    if difference is None or difference.ratio is None:
        return ""
    low, high = difference.ratio_low, difference.ratio_high
    bounds = f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else ""
    return f"x{difference.ratio:.2f}{bounds}"
