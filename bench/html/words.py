"""How figures, kinds and verdicts are written, in the page as in the terminal."""

from html import escape

from bench.statistics import METRICS, Comparison, Difference, Metric

KINDS = {
    "live": "REAL",
    "simulated": "MODEL RANKS IN THE REAL SERVER",
    "virtual": "MODEL (virtual time)",
}
UNKNOWN = "–"  # noqa: RUF001
MINUS = "\N{MINUS SIGN}"


def kind_label(kind: str) -> str:
    """The kind in large letters; an unknown kind is never taken for a real one."""
    return KINDS.get(kind, f"MODEL? ({kind})")


def number(value: float | None) -> str:
    """Three digits that matter, as 1,234 or 0.0123."""
    if value is None:
        return UNKNOWN
    size = abs(value)
    digits = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 1 else 3
    if 0 < size < 0.01:
        return f"{value:.2g}".replace("-", MINUS)
    return f"{value:,.{digits}f}".replace("-", MINUS)


def signed(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


def interval(low: float | None, high: float | None, *, sign: bool = True) -> str:
    if low is None or high is None:
        return ""
    show = signed if sign else number
    return f"[{show(low)}, {show(high)}]"


def duration(milliseconds: float) -> str:
    """As 300 ms or 2.5 s."""
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:,.3g} s"
    return f"{milliseconds:.3g} ms"


def good_or_bad(difference: Difference | None, metric: Metric) -> str:
    """ "better", "worse", "same" or "unknown", as the interval says."""
    if difference is None or difference.verdict == "unknown":
        return "unknown"
    if difference.verdict == "no difference":
        return "same"
    if metric.more_is_better is None:
        return "same"
    return "better" if (difference.verdict == "higher") is metric.more_is_better else "worse"


IDEAL = ("oracle", "lmetric", "least_waiting_uncached")
"""Arms that see what no dispatcher can see: bounds, not candidates."""


def best(comparisons: list[Comparison], metric: Metric) -> str | None:
    """The arm to mark: the best mean, if its interval against the baseline excludes zero.

    The baseline is marked where every other arm is worse than it by the same rule. Arms that lack
    seeds (an interrupted run) do not compete: their mean is over other work; nor do IDEAL ones.
    """
    if metric.more_is_better is None:
        return None
    comparisons = [each for each in comparisons if each.arm.partition(":")[0] not in IDEAL]
    whole = max((each.seeds for each in comparisons), key=len, default=[])
    known = [(f.mean, c) for c in comparisons if c.seeds == whole and (f := c.figures[metric.name])]
    if len(known) < 2:
        return None
    first = (max if metric.more_is_better else min)(known, key=lambda pair: pair[0])[1]
    if first.arm != first.baseline:
        figure = first.figures[metric.name]
        better = figure and good_or_bad(figure.difference, metric) == "better"
        return first.arm if better else None
    others = [c.figures[metric.name] for _, c in known if c is not first]
    worse = all(f and good_or_bad(f.difference, metric) == "worse" for f in others)
    return first.arm if worse else None


def grouped(comparisons: list[Comparison]) -> dict[tuple[str, str], list[Comparison]]:
    """(workload, kind) -> its arms, in the order in which they come."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for each in comparisons:
        groups.setdefault((each.workload, each.kind), []).append(each)
    return groups


def metric(name: str) -> Metric:
    return next(each for each in METRICS if each.name == name)


def tag(name: str, *children: str, cls: str = "", **attributes: str) -> str:
    """An element; attributes are escaped, children are markup already: `text` escapes."""
    given = {"class": cls, **attributes} if cls else attributes
    inside = "".join(f' {key}="{escape(value)}"' for key, value in given.items())
    return f"<{name}{inside}>{''.join(children)}</{name}>"


def text(value: object) -> str:
    return escape(str(value))


def arm_name(arm: str) -> str:
    """Escaped, with places to break the line before each parameter."""
    return text(arm).replace(":", "<wbr>:")
