"""The page, put together: header, the matter at a glance, a section a workload."""

from pathlib import Path
from string import Template
from typing import Any

from bench.html import tables
from bench.html.figure import Line, Pictures, lines
from bench.html.plots import Arms, plots
from bench.html.series import Series
from bench.html.sweep import sweep_plots, sweeps
from bench.html.words import KINDS, grouped, kind_label, tag, text
from bench.intervals import BOOTSTRAP_FROM
from bench.statistics import Comparison

HERE = Path(__file__).parent
APART = ("workloads",)
"""Keys of `about` that the header does not list."""
HOW_TO_READ = (
    "Figures are means over seeds, ± their standard deviation between seeds. A seed fixes keys, "
    "lengths and order for all arms, so each arm is compared with the baseline seed by seed; "
    f"the interval holds 95 % (Student's t on the paired differences below {BOOTSTRAP_FROM} seeds, "
    "bootstrap from there on) and the words are <em>no difference</em> where it holds zero, or "
    "where the interval of the ratio holds one. Ratios (arm / baseline) are geometric means. "
    "<b>★</b> marks the best mean of a column among arms that a server can run (not oracle, "
    "lmetric, least_waiting_uncached, which see every cache), and only if it differs from the "
    "baseline; it says nothing against the second best. Reuse: cached share of prompt tokens. "
    "Uncached max/mean: the rank with most uncached tokens against the mean of all. Idle share: "
    "of the time in which some rank worked, a rank's share without work; both explain, and are "
    "not judged. TTFT: to the first token; TPOT: between tokens; E2E: to the last. Goodput: "
    "answers whose first token came within 2 s. Colours: <span class='better'>better</span>, "
    "<span class='worse'>worse</span>."
)


def page(
    series: list[Series], comparisons: list[Comparison], about: dict[str, Any], notes: list[str]
) -> str:
    """The whole page; about: with `baseline`."""
    pictures = Pictures()
    pictured = _pictured(comparisons)
    look = lines(pictured, str(about["baseline"]))
    told = about.get("workloads") or {}
    sections = [
        _section(i, key, arms, series, _Look(look, pictures), str(told.get(key[0], "")))
        for i, (key, arms) in enumerate(grouped(comparisons).items())
    ]
    sweep = sweep_plots(comparisons, pictures)
    if sweep:
        sections.append(tag("section", tag("h2", "Sweep of the overload guard"), sweep, id="sweep"))
    fields = {
        "title": text(f"{_kinds(comparisons)}: bench of sglang-dp-sidecar"),
        "style": (HERE / "style.css").read_text(encoding="utf-8"),
        "banner": _banner(comparisons),
        "about": tables.about_table(_header(about, comparisons)),
        "notes": _notes(notes, comparisons, str(about["baseline"])),
        "glance": _glance(comparisons, pictured),
        "sections": "\n".join(sections),
    }
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(fields)


def _kinds(comparisons: list[Comparison]) -> str:
    found = {each.kind for each in comparisons}
    known = [kind for kind in KINDS if kind in found]
    return " + ".join(map(kind_label, known + sorted(found - set(KINDS)))) or "NO RESULTS"


def _banner(comparisons: list[Comparison]) -> str:
    real = {each.kind for each in comparisons} == {"live"}
    return tag("p", text(_kinds(comparisons)), cls="banner real" if real else "banner")


def _header(about: dict[str, Any], comparisons: list[Comparison]) -> dict[str, Any]:
    shown = {key: value for key, value in about.items() if key not in APART}
    shown.setdefault("seeds", sorted({seed for each in comparisons for seed in each.seeds}))
    return shown


def _pictured(comparisons: list[Comparison]) -> list[str]:
    """Arms that pictures by arm show: those of a sweep have heat maps of their own."""
    arms = list(dict.fromkeys(each.arm for each in comparisons))
    swept = {arm for points in sweeps(arms).values() for arm in points.values()}
    return [arm for arm in arms if arm not in swept]


def _notes(notes: list[str], comparisons: list[Comparison], baseline: str) -> str:
    found = list(notes)
    for (workload, _), arms in grouped(comparisons).items():
        if all(each.arm != each.baseline for each in arms):
            found.append(f"{workload}: {baseline} was not run, so nothing is compared with it.")
        found += [
            f"{workload}, {each.arm}: {each.counts['failed']:.3g} of "
            f"{each.counts['requests']:.4g} requests a run failed; latencies are of the others."
            for each in arms
            if each.counts["failed"]
        ]
        if all(len(each.seeds) < 2 for each in arms):
            found.append(f"{workload}: one seed, so there are no intervals.")
    if not comparisons:
        found.append("Nothing was measured.")
    return tag("ul", *(tag("li", text(note)) for note in found), cls="notes") if found else ""


def _glance(comparisons: list[Comparison], pictured: list[str]) -> str:
    if not comparisons:
        return ""
    made = tables.comparisons_made(comparisons)
    chance = (
        f"This page shows {made} intervals; where nothing differs at all, about 1 in 20 would "
        f"still exclude zero ({made / 20:.0f} of them). One alone is weak evidence."
    )
    names = [
        tag("a", text(workload), href=f"#w{i}")
        for i, (workload, _) in enumerate(grouped(comparisons))
    ]
    return (
        tag("h2", "At a glance")
        + tables.glances(comparisons, {each.arm for each in comparisons} - set(pictured))
        + tag("p", HOW_TO_READ, " ", chance, cls="how")
        + tag("nav", "Workloads: ", " · ".join(names))
    )


class _Look:
    """How the pictures of the page are drawn."""

    def __init__(self, look: dict[str, Line], pictures: Pictures) -> None:
        self.lines = look
        self.pictures = pictures


def _section(
    place: int,
    key: tuple[str, str],
    arms: list[Comparison],
    series: list[Series],
    look: _Look,
    description: str,
) -> str:
    workload, kind = key
    runs: dict[str, list[Series]] = {}
    for each in sorted(series, key=lambda one: one.run.seed):
        run = each.run
        if (run.workload, run.kind) == key and run.arm in look.lines:
            runs.setdefault(run.arm, []).append(each)
    ordered = {arm: runs[arm] for arm in look.lines if arm in runs}
    title = tag("h2", text(workload), tag("small", text(kind_label(kind))))
    parts = [
        tag("p", text(description)) if description else "",
        tables.folded(arms, {each.arm for each in arms} - look.lines.keys()),
        plots(Arms(ordered, look.lines, look.pictures)),
    ]
    return tag("section", title, *parts, id=f"w{place}")
