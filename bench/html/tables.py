"""The tables of the page."""

from typing import Any

from bench.html.words import (
    MINUS,
    UNKNOWN,
    arm_name,
    best,
    good_or_bad,
    grouped,
    interval,
    kind_label,
    metric,
    number,
    signed,
    tag,
    text,
)
from bench.statistics import COUNTS, METRICS, Comparison, Difference, Metric

GLANCE = ("ttft_ms_mean", "req_per_s")
HALF = 6
"""Metrics in each of the two tables of differences: more do not fit on paper."""


def about_table(about: dict[str, Any]) -> str:
    rows = [tag("tr", tag("th", text(key)), tag("td", text(_plain(about[key])))) for key in about]
    return tag("table", *rows, cls="about")


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


def glance(comparisons: list[Comparison], which: Metric) -> str:
    """Every arm on every workload: one metric as a ratio to the baseline."""
    groups = grouped(comparisons)
    arms = list(dict.fromkeys(each.arm for each in comparisons if each.arm != each.baseline))
    heads = [tag("th", arm_name(workload)) for workload, _ in groups]
    kinds = {kind for _, kind in groups}
    if len(kinds) > 1:
        heads = [tag("th", arm_name(w), tag("small", text(kind_label(k)))) for w, k in groups]
    rows = [tag("tr", tag("th", "arm"), *heads)]
    for arm in arms:
        found = [next((c for c in group if c.arm == arm), None) for group in groups.values()]
        rows.append(tag("tr", tag("th", arm_name(arm)), *(_ratio_cell(c, which) for c in found)))
    return _scrolled(rows)


def _ratio_cell(comparison: Comparison | None, which: Metric) -> str:
    figure = comparison.figures[which.name] if comparison else None
    difference = figure.difference if figure else None
    if difference is None:
        return tag("td", UNKNOWN, cls="unknown")
    word = _word(difference)
    value = f"×{number(difference.ratio)}" if difference.ratio else signed(difference.mean)  # noqa: RUF001
    return tag("td", value, tag("small", word), cls=good_or_bad(difference, which))


def _word(difference: Difference) -> str:
    if difference.verdict == "unknown":
        return "1 seed: no interval"
    return difference.verdict


def folded(arms: list[Comparison], swept: set[str]) -> str:
    """Both tables; arms of a sweep in tables of their own, folded away."""
    parts = [_tables([each for each in arms if each.arm not in swept])]
    rest = [each for each in arms if each.arm in swept]
    if rest:
        base = [each for each in arms if each.arm == each.baseline and each.arm not in swept]
        title = tag("summary", f"Tables of the {len(rest)} arms of the sweep")
        parts.append(tag("details", title, _tables(base + rest)))
    return "".join(parts)


def _tables(arms: list[Comparison]) -> str:
    if not arms:
        return ""
    against = tag("small", f"arm {MINUS} {text(arms[0].baseline)}")
    return (
        tag("h3", "Arms")
        + arms_table(arms)
        + tag("h3", "Paired differences, 95 % intervals ", against)
        + (differences_table(arms) or tag("p", "There is nothing to compare."))
    )


def arms_table(arms: list[Comparison]) -> str:
    """Means over seeds; the best is marked by the rule of `words.best`."""
    heads = [tag("th", text(m.label), tag("small", m.unit)) for m in METRICS]
    heads += [tag("th", text(name)) for name in COUNTS]
    rows = [tag("tr", tag("th", "arm"), *heads)]
    marked = {m.name: best(arms, m) for m in METRICS}
    for each in arms:
        cells = [_mean_cell(each, m, each.arm == marked[m.name]) for m in METRICS]
        cells += [_count_cell(name, each.counts[name]) for name in COUNTS]
        role = tag("small", "baseline") if each.arm == each.baseline else ""
        seeds = f"{len(each.seeds)} seed{'s' if len(each.seeds) != 1 else ''}"
        name = tag("th", arm_name(each.arm), role or tag("small", seeds))
        rows.append(tag("tr", name, *cells))
    return _scrolled(rows)


def _mean_cell(arm: Comparison, which: Metric, marked: bool) -> str:
    figure = arm.figures[which.name]
    if figure is None:
        return tag("td", UNKNOWN, cls="unknown")
    spread = "" if figure.sd is None else tag("small", f"±{number(figure.sd)}")
    hint = f"{number(figure.low)} to {number(figure.high)} over {figure.seeds} seeds"
    star = "★ " if marked else ""
    return tag("td", star + number(figure.mean), spread, cls="best" if marked else "", title=hint)


def _count_cell(name: str, count: float | None) -> str:
    return tag("td", number(count), cls="worse" if name == "failed" and count else "")


def differences_table(arms: list[Comparison]) -> str:
    """Arm minus baseline with its interval and the verdict, and the ratio."""
    others = [each for each in arms if each.arm != each.baseline]
    if not others:
        return ""
    halves = []
    for part in (METRICS[:HALF], METRICS[HALF:]):
        heads = [tag("th", text(m.label), tag("small", m.unit)) for m in part]
        rows = [tag("tr", tag("th", "arm"), *heads)]
        for each in others:
            cells = [_difference_cell(each, m) for m in part]
            rows.append(tag("tr", tag("th", arm_name(each.arm)), *cells))
        halves.append(_scrolled(rows, "even"))
    return "".join(halves)


def _difference_cell(arm: Comparison, which: Metric) -> str:
    figure = arm.figures[which.name]
    difference = figure.difference if figure else None
    if difference is None:
        return tag("td", UNKNOWN, cls="unknown")
    bounds = interval(difference.low, difference.high)
    ratio = ""
    if difference.ratio is not None:
        limits = interval(difference.ratio_low, difference.ratio_high, sign=False)
        ratio = tag("small", f"×{number(difference.ratio)} {limits}")  # noqa: RUF001
    hint = f"{difference.pairs} pairs, {difference.method}"
    return tag(
        "td",
        tag("b", signed(difference.mean)),
        " ",
        tag("span", bounds),
        ratio,
        tag("em", _word(difference)),
        cls=good_or_bad(difference, which),
        title=hint,
    )


def comparisons_made(comparisons: list[Comparison]) -> int:
    """How many intervals the page shows."""
    figures = [f for each in comparisons for f in each.figures.values()]
    return sum(
        f is not None and f.difference is not None and f.difference.pairs > 1 for f in figures
    )


def glances(comparisons: list[Comparison], swept: set[str]) -> str:
    """The matter at a glance: GLANCE of every arm but those of a sweep."""
    shown = [each for each in comparisons if each.arm not in swept]
    parts = []
    for name in GLANCE:
        which = metric(name)
        wish = "higher is better" if which.more_is_better else "lower is better"
        title = tag("h3", text(which.label), tag("small", f"as a ratio to the baseline, {wish}"))
        parts.append(tag("div", title, glance(shown, which)))
    return tag("div", *parts, cls="glances")


def _scrolled(rows: list[str], cls: str = "") -> str:
    body = tag("thead", rows[0]) + tag("tbody", *rows[1:])
    return tag("div", tag("table", body, cls=cls), cls="scroll")
