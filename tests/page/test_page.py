"""The status page in a real Chromium: what it shows, what it asks for, keys, names that lie."""

from typing import Any

import pytest
from selenium.webdriver import ActionChains, Keys

from sidecar.policies import REASONS, SPILLS
from sidecar.top.rates import HITS
from tests.page.browser import Browser
from tests.page.feed import Feed
from tests.page.stub import Stub, instance, rank, session, status
from tests.processes import short_directory, sidecar_process, wait_for

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><b>\u202ebold</b>&amp;"
CELLS = ".grid button"


def keys(page: Browser, *pressed: str) -> None:
    for key in pressed:
        ActionChains(page.driver).send_keys(key).perform()


def focused(page: Browser, expression: str = "innerText") -> Any:
    return page.js(f"document.activeElement.{expression}")


def test_shows_a_real_sidecar_and_asks_nobody_else(page: Browser) -> None:
    with short_directory() as folder, sidecar_process(f"ipc://{folder}/q") as sidecar:
        origin = f"http://127.0.0.1:{sidecar.port}/"
        with Feed(sidecar) as feed:
            feed.play()
            page.open(origin)
            assert page.text("#state") == "on: 1 server, 8 ranks"
            assert page.text(".instance h2").startswith("gpu-1:30000")
            before = page.texts(f"{CELLS} b")
            page.wait("document.querySelectorAll('#paths-list tbody tr[data-id]').length === 16")
            feed.play(1)
            page.wait(
                f"document.querySelectorAll('{CELLS} b')[0].innerText !== arguments[0]", before[0]
            )
        asked = page.requests()
        assert len(asked) > 10
        assert not [url for url in asked if not url.startswith(origin)]
        assert page.complaints() == []


def test_ranks_and_figures(page: Browser, stub: Stub) -> None:
    page.open(stub.url)
    stub.status = status(instance("gpu-1:30000", 8, 10), step=10)
    page.wait("document.querySelector('#figures b').innerText.match(/[0-9]/)")
    figures = dict(zip(page.texts("#figures dt"), page.texts("#figures b"), strict=True))
    assert (figures["hit"], figures["spill"], figures["fallback"]) == ("91%", "2.7%", "0.9%")
    assert figures["bypass"] == "0.5%"
    assert figures["decide p50"] == "18 µs"
    loads = [str(one["load"]) for one in stub.status["instances"][0]["ranks"]]
    assert page.texts(f"{CELLS} b") == loads
    assert page.texts(".ranks tbody tr td:nth-child(2)") == loads
    assert "affinity_hit" in page.text(".tally")
    assert "deadline" in page.texts(".tally")[1]
    assert "prefix_affinity, 10% of the keys" in page.text("#policy")


def test_changes_of_policy(page: Browser, stub: Stub) -> None:
    page.open(stub.url)
    rows = [text.split("\t")[1:4] for text in page.texts("#changes tbody tr")]
    assert rows == [
        ["canary", "prefix_affinity", "3"],
        ["reload", "kv_affinity", "2"],
        ["start", "kv_affinity", "1"],
    ]
    assert "10% of the keys" in page.text("#changes tbody tr")
    another = {"version": 4, "at": 1_790_010_000, "what": "set", "policy": "round_robin"}
    told = status(instance("a", 2), policy="round_robin", policy_version=4, canary=None)
    told["changes"].append(another | {"params": {}, "share": None})
    stub.status = told
    page.wait("document.querySelectorAll('#changes tbody tr').length === 4")
    assert "round_robin, version 4" in page.text("#policy")
    assert "set\tround_robin\t4" in page.text("#changes tbody tr")


def test_320_ranks_fit_and_sort(page: Browser, stub: Stub) -> None:
    stub.status = status(instance("gpu-1:30000", 320))
    page.open(stub.url)
    assert page.js(f"document.querySelectorAll('{CELLS}').length") == 320
    height = page.js("document.querySelector('.grid').getBoundingClientRect().height")
    assert height < 600, "the grid is no list"
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    assert page.texts(".ranks tbody tr") == []  # folded
    page.js("document.querySelector('.table summary').click()")
    page.wait("document.querySelectorAll('.ranks tbody tr').length === 320")
    page.js("document.querySelectorAll('.ranks thead button')[1].click()")
    loads = [int(text) for text in page.texts(".ranks tbody tr td:nth-child(2)")]
    assert loads == sorted(loads, reverse=True)
    sort = "document.querySelectorAll('.ranks thead th')[1].getAttribute('aria-sort')"
    assert page.js(sort) == "descending"


@pytest.mark.parametrize("width", [400, 800, 1280])
def test_nothing_is_cut_off_sideways(page: Browser, stub: Stub, width: int) -> None:
    stub.status = status(instance("gpu-1.a-rather-long-name.of-a-cluster.example:30000", 320))
    stub.paths = [session(n) for n in range(200)]
    page.size(width, 800)
    page.open(stub.url)
    assert page.js("document.documentElement.scrollWidth <= innerWidth")


def test_down_and_stale_ranks_show(page: Browser, stub: Stub) -> None:
    unknown = dict.fromkeys(("running", "waiting", "report_age_seconds", "tokens"))
    ranks = [rank(0), rank(1, live=False), rank(2, report_age_seconds=60), rank(3, **unknown)]
    stub.status = status(instance("a", 0, ranks=ranks))
    page.open(stub.url)
    assert page.text(".ranks h3") == "Ranks 4, 1 down, 2 without a fresh report"
    assert page.texts(f"{CELLS} b")[1] == "down"
    stale = f"[...document.querySelectorAll('{CELLS}')].map((cell) => cell.dataset.stale ?? '')"
    assert page.js(stale) == ["", "", "yes", "yes"]


def test_light_and_dark(page: Browser, stub: Stub) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    page.open(stub.url)
    assert page.js(colour) == "rgb(255, 255, 255)"
    page.prefer("dark")
    dark = page.js(colour)
    assert dark != "rgb(255, 255, 255)"
    button = "document.querySelector('#theme').click()"
    page.js(button)
    assert page.text("#theme") == "Theme: light"
    assert page.js(colour) == "rgb(255, 255, 255)"
    page.open(stub.url)  # it is remembered
    assert page.js(colour) == "rgb(255, 255, 255)"
    page.js(button)
    page.prefer("light")
    assert (page.text("#theme"), page.js(colour)) == ("Theme: dark", dark)
    page.js(button)
    assert (page.text("#theme"), page.js(colour)) == ("Theme: auto", "rgb(255, 255, 255)")


# WCAG 2.2, success criterion 1.4.3
CONTRAST = """(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((part) => {
      const c = part / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour.endsWith(", 0)") ? behind(element.parentElement) : colour;
  };
  const ratio = (element) => {
    const both = [getComputedStyle(element).color, behind(element)].map(light);
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  };
  return [...document.querySelectorAll("body *")]
    .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .filter((e) => e.checkVisibility() && !e.closest("svg, .skip"))
    .map((e) => [ratio(e), e.outerHTML.slice(0, 90)])
    .filter(([found]) => found < 4.5);
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(page: Browser, stub: Stub, scheme: str) -> None:
    ranks = [rank(n, running=n, waiting=0, in_flight=0, load=n) for n in range(17)]
    ranks.append(rank(17, live=False))
    stub.status = status(instance("a", 0, ranks=ranks), last_reload_ok=False)
    stub.paths = [session(1)]
    page.prefer(scheme)
    page.open(stub.url)
    heats = page.js(
        f"new Set([...document.querySelectorAll('{CELLS}')].map((c) => c.dataset.heat)).size"
    )
    assert heats == 10
    assert page.js(CONTRAST) == []


def test_works_from_the_keyboard(page: Browser, stub: Stub) -> None:
    stub.status = status(instance("gpu-1:30000", 40))
    stub.paths = [session(n) for n in range(5)]
    page.open(stub.url)
    keys(page, Keys.TAB)
    assert focused(page) == "Skip to the content"
    assert page.js("document.activeElement.getBoundingClientRect().left >= 0")
    keys(page, Keys.ENTER, Keys.TAB)  # past the header
    assert focused(page, "id") == "changes"  # what scrolls can be scrolled
    keys(page, Keys.TAB)
    assert focused(page, "tagName") == "SUMMARY"
    keys(page, Keys.TAB)
    assert focused(page, "value") == "load"
    keys(page, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert focused(page, "value") == "KV"
    keys(page, Keys.TAB)
    assert focused(page, "dataset.rank") == "0"
    width = page.js("getComputedStyle(document.activeElement).outlineStyle")
    assert width == "solid"
    columns = page.js(
        "getComputedStyle(document.querySelector('.grid')).gridTemplateColumns.split(' ').length"
    )
    keys(page, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert focused(page, "dataset.rank") == str(columns + 1)
    assert page.text(".readout").startswith(f"rank {columns + 1} ")
    keys(page, Keys.END)
    assert focused(page, "dataset.rank") == "39"
    page.round()  # a new answer leaves the focus where it is
    assert focused(page, "dataset.rank") == "39"
    keys(page, Keys.TAB, Keys.TAB)
    assert focused(page).startswith("rank")
    keys(page, Keys.TAB, Keys.ENTER)
    assert page.js("document.activeElement.closest('th').ariaSort") == "descending"
    for _ in range(9):
        keys(page, Keys.TAB)
    assert focused(page, "tagName") == "TR"
    keys(page, Keys.ARROW_DOWN)
    row = focused(page, "dataset.rank")
    stub.status = status(instance("gpu-1:30000", 40, 5), step=5)
    page.round()
    assert focused(page, "dataset.rank") == row
    keys(page, Keys.TAB)
    assert focused(page, "id") == "prefix"
    keys(page, Keys.TAB, Keys.ARROW_DOWN)
    assert focused(page, "dataset.id") is not None
    assert page.js("document.querySelectorAll('svg.path').length") == 1


def test_names_are_text(page: Browser, stub: Stub) -> None:
    told = instance(HOSTILE, 2, about={"sglang": HOSTILE}, bypassed={HOSTILE: 1})
    told["decisions"] = {HOSTILE: {HOSTILE: 3}}
    changed = {"version": 1, "at": 0, "what": HOSTILE, "policy": HOSTILE, "params": {HOSTILE: 1}}
    stub.status = status(
        told, policy=HOSTILE, version=HOSTILE, policy_params={HOSTILE: HOSTILE}, changes=[changed]
    )
    stub.paths = [session(1, name=HOSTILE) | {"key_hash": HOSTILE}]
    stub.paths[0]["steps"][0]["reason"] = HOSTILE
    page.open(stub.url)
    page.wait("document.querySelectorAll('#paths-list tr[data-id]').length === 1")
    keys_row = "document.querySelector('#paths-list tr[data-id]').focus()"
    page.js(keys_row)
    assert page.text(".instance h2").startswith(HOSTILE)
    assert page.js("document.querySelectorAll('img, b b').length") == 0
    assert page.js("document.title") == "sglang-dp-sidecar"
    assert page.complaints() == []


def test_sessions_are_found_by_their_hash(page: Browser, stub: Stub) -> None:
    stub.paths = [session(n) for n in range(200)]
    wanted = stub.paths[7]
    page.open(stub.url)
    page.wait("document.querySelectorAll('#paths-list tr[data-id]').length === 200")
    page.js("document.querySelector('#prefix').focus()")
    keys(page, wanted["key_hash"][:6].upper())
    assert page.texts("#paths-list tbody th") == [wanted["key_hash"]]
    assert page.text("#paths-count") == "1 of the newest 200"
    keys(page, Keys.TAB)
    ranks = {str(step["rank"]) for step in wanted["steps"]}
    assert (
        set(page.js("[...document.querySelectorAll('svg.path text')].map((t) => t.textContent)"))
        == ranks
    )
    assert page.js("document.querySelectorAll('svg.path circle').length") == len(wanted["steps"])
    assert len(page.texts(".steps tbody tr")) == len(wanted["steps"])


def test_a_sidecar_without_paths(page: Browser, stub: Stub) -> None:
    stub.paths = None
    page.open(stub.url)
    page.wait("document.querySelector('#paths-list').innerText.includes('keeps no paths')")
    assert page.js("document.querySelector('#banner').hidden")


def test_a_sidecar_that_is_gone(page: Browser, stub: Stub) -> None:
    page.open(stub.url)
    assert page.js("document.querySelector('#banner').hidden")
    stub.stop()
    page.wait("!document.querySelector('#banner').hidden")
    assert "No answer from the sidecar: it cannot be reached" in page.text("#banner")
    assert page.js("document.querySelector('#banner [role=alert]') !== null")
    assert len(page.texts(CELLS)) == 8  # the last known stays
    stub.start()
    page.wait("document.querySelector('#banner').hidden")


@pytest.mark.parametrize("answer", [None, [], {"policy": 1}, "x"])
def test_an_answer_of_a_stranger(page: Browser, stub: Stub, answer: Any) -> None:
    stub.status = answer
    page.open(stub.url)
    assert "no sidecar" in page.text("#banner")


def test_ranks_that_never_report(page: Browser, stub: Stub) -> None:
    stub.status = status(instance("a", 0, ranks=[rank(0, report_age_seconds=None)]))
    page.open(stub.url)
    assert page.text("#state") == "connected, but no rank reports its load"


def test_no_server_yet(page: Browser, stub: Stub) -> None:
    stub.status = status()
    page.open(stub.url)
    assert page.text("#state") == "waiting: no SGLang server has connected"


def test_a_hidden_page_asks_nothing(page: Browser, stub: Stub) -> None:
    hide = "Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true})"
    event = "document.dispatchEvent(new Event('visibilitychange'))"
    page.open(stub.url)
    page.driver.execute_script("window.setTimeout = () => { window.scheduled = true; return 1; }")
    before = page.js("performance.getEntriesByName('round').length")
    page.js(f"{hide} && {event}", True)
    # The round that was waiting comes; it must be the last.
    page.wait("performance.getEntriesByName('round').length > arguments[0]", before)
    assert not page.js("window.scheduled")
    asked = len(stub.asked)
    page.js(f"{hide} && {event}", False)
    wait_for(lambda: len(stub.asked) > asked)
    page.wait("window.scheduled")


def test_groups_are_those_of_the_reasons(page: Browser, stub: Stub) -> None:
    page.open(stub.url)
    script = "import('./page/model.js').then((model) => arguments[0](model.GROUPS))"
    groups = page.driver.execute_async_script(script)
    assert sorted(reason for group in groups.values() for reason in group) == sorted(REASONS)
    assert set(groups["hit"]) == HITS
    assert set(groups["spill"]) == SPILLS
