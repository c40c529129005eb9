"""The report: bytes, escaping, what it says, and runs in which much is missing."""

import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench.html import read_outcomes, text_table, write_report
from bench.html.words import number
from bench.outcome import Outcome, Row, Sample
from bench.statistics import compare
from tests.bench.synthetic import outcome, small, sweep

EVIL = "<script>alert(1)</script>&\"'$x_1$"
VOID = {"meta", "br", "wbr", "link", "img"}


class Checked(HTMLParser):
    """Finds what is not closed in turn, ids that are not unique, and everything fetched."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.fetched: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open += [] if tag in VOID else [tag]
        for key, value in attrs:
            self.ids += [value or ""] if key == "id" else []
            if key in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.fetched.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def report(folder: Path, outcomes: list[Outcome], *notes: str, **about: Any) -> str:
    path = write_report(folder, iter(outcomes), about, list(notes))
    return path.read_text(encoding="utf-8")


def checked(page: str) -> Checked:
    found = Checked(page)
    assert len(found.ids) == len(set(found.ids))
    assert found.fetched == []
    assert "url(http" not in page and "@import" not in page
    assert "script" not in found.tags
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', page))
    assert used <= set(found.ids)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    folder = tmp_path_factory.mktemp("report")
    arms = ("round_robin", "prefix_affinity", EVIL)
    outcomes = [outcome("w<b>", arm, seed, 90) for arm in arms for seed in range(3)]
    outcomes += sweep("w<b>", 0)
    about = {"cpu": EVIL, "baseline": "round_robin", "workloads": {"w<b>": "16 & 32 groups"}}
    write_report(folder, outcomes, about, ["mooncake <i>skipped</i>"])
    return folder, outcomes


def test_the_page_is_whole_and_fetches_nothing(whole: tuple[Path, list[Outcome]]) -> None:
    found = checked((whole[0] / "report.html").read_text(encoding="utf-8"))
    said = "".join(found.texts)
    assert EVIL in said and "mooncake <i>skipped</i>" in said and "16 & 32 groups" in said
    assert "MODEL (virtual time)" in said and "REAL" not in said
    assert "no difference" in said
    for picture in ("Time to first token", "Load of each rank", "Cached share", "Rank of each"):
        assert picture in said
    assert "Spills: preferred" in said and "Sweep of the overload guard" in said


def test_same_input_same_bytes(whole: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    folder, outcomes = whole
    about = json.loads((folder / "result.json").read_text())["about"]
    write_report(tmp_path, outcomes, about, ["mooncake <i>skipped</i>"])
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["report.html", "result.json", "rows.jsonl.gz"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_rows_come_back(whole: tuple[Path, list[Outcome]]) -> None:
    folder, outcomes = whole
    assert list(read_outcomes(folder / "rows.jsonl.gz")) == outcomes
    with gzip.open(folder / "rows.jsonl.gz", "rt") as rows:
        assert len(rows.readlines()) == len(outcomes)


def test_result_has_runs_and_comparisons(whole: tuple[Path, list[Outcome]]) -> None:
    result = json.loads((whole[0] / "result.json").read_text())
    assert [run["arm"] for run in result["runs"]] == [each.arm for each in whole[1]]
    assert result["notes"] == ["mooncake <i>skipped</i>"]
    figures = {each["arm"]: each["figures"] for each in result["comparisons"]}
    assert figures["round_robin"]["reuse"]["difference"] is None
    assert figures["prefix_affinity"]["ttft_ms_mean"]["difference"]["verdict"] == "lower"


def test_matplotlib_stays_as_it_was(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    report(tmp_path, [small("a")])
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("kinds", "banner"),
    [
        (["live"], "REAL"),
        (["simulated"], "MODEL RANKS IN THE REAL SERVER"),
        (["virtual", "simulated"], "MODEL RANKS IN THE REAL SERVER + MODEL (virtual time)"),
        (["other"], "MODEL? (other)"),
        ([], "NO RESULTS"),
    ],
)
def test_the_banner_says_what_was_measured(tmp_path: Path, kinds: list[str], banner: str) -> None:
    page = report(tmp_path, [small("a", kind=kind) for kind in kinds])
    checked(page)
    found = re.search(r'<p class="(banner[^"]*)">([^<]*)</p>', page)
    assert found and found.group(2) == banner
    assert ("real" in found.group(1)) == (kinds == ["live"])


def failed(arm: str) -> Outcome:
    found = small(arm)
    for row in found.rows:
        row.error = "refused"
    return found


def unknown(arm: str) -> Outcome:
    """What a client knows of a server that says nothing of itself."""
    found = small(arm, samples=[], idle_share=None, spills=None, fallbacks=None, bypasses=None)
    for row in found.rows:
        row.rank = row.cached_tokens = row.preferred = -1
    return found


MISSING = {
    "none": [],
    "no rows": [small("a", rows=[], samples=[], seconds=0.0)],
    "samples only": [small("a", rows=[])],
    "failed": [failed("a"), small("b")],
    "all failed": [failed("a"), failed("b")],
    "unknown": [unknown("a"), unknown("b")],
    "one": [small("a")],
    "no baseline": [small("b"), small("c")],
    "no samples": [small("a", samples=[]), small("b", samples=[Sample(0.0, [0] * 8)])],
    "one row": [small("a", rows=[Row(0, 0, 0, 0.0, 0, 10, 0, 1, 0.0, 0.0)], seconds=0.0)],
    "sweep": sweep("w", 0),
}


@pytest.mark.parametrize("outcomes", MISSING.values(), ids=MISSING)
def test_much_may_be_missing(tmp_path: Path, outcomes: list[Outcome]) -> None:
    checked(report(tmp_path, outcomes, baseline="a"))
    table = text_table(compare(outcomes, "a"))
    assert bool(table) == bool(outcomes)


def test_notes_say_what_is_missing(tmp_path: Path) -> None:
    lone = report(tmp_path, [failed("a"), small("b")], "interrupted", baseline="x")
    assert "interrupted" in lone
    assert "w: x was not run, so nothing is compared with it." in lone
    assert "w, a: 60 of 60 requests a run failed" in lone
    assert "w: one seed, so there are no intervals." in lone
    assert "Nothing was measured." in report(tmp_path, [])


def test_an_interrupted_report_leaves_no_half_file(tmp_path: Path) -> None:
    def outcomes() -> Any:
        yield small("a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_report(tmp_path, outcomes(), {}, [])
    assert list(tmp_path.iterdir()) == []


def test_every_dot_is_drawn(tmp_path: Path) -> None:
    # sixteen requests of one session on one rank stand in line: none may be merged away
    rows = [Row(i, 0, i, float(i), 2, 10, 5, 2, 10.0, 20.0) for i in range(16)]
    page = report(tmp_path, [small("a", rows=rows, samples=[])])
    panel = page[page.index("Rank of each session") :]
    dots = re.findall(r"M ([\d.]+) ([\d.]+) L \1 \2 ", panel[: panel.index("</figure>")])
    assert len(dots) == 16


def test_texts_in_pictures_keep_their_digits(tmp_path: Path) -> None:
    page = report(tmp_path, sweep("w", 0))
    reuse = compare(sweep("w", 0), "-")[0].figures["reuse"]
    assert reuse is not None and f">{number(reuse.mean)}</text>" in page
