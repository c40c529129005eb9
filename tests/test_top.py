"""`top`: what it makes of two answers, its frames, what it says when it cannot."""

import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sidecar.cli import main
from sidecar.errors import ConfigError, ControlError
from sidecar.metrics import Health
from sidecar.metrics import status as status_of
from sidecar.policies import REASONS
from sidecar.top import text
from sidecar.top.frame import Size, frame
from sidecar.top.rates import HITS, History, Picture, picture, quantile, since
from sidecar.top.source import Source, Status, url_of
from tests.page.stub import instance, rank, status
from tests.processes import free_port
from tests.support import keyed, make_dispatcher, query, report

URL = "http://127.0.0.1:9477"


def at(step: int, *instances: dict[str, Any], ranks: int = 8, **changes: Any) -> Status:
    """The answer after `step` seconds."""
    told = instances or (instance("gpu-1:30000", ranks, step),)
    return msgspec.convert(status(*told, step=step, **changes), Status)


def seen(step: int = 10, ranks: int = 8, **changes: Any) -> Picture:
    return picture(at(0, ranks=ranks, **changes), at(step, ranks=ranks, **changes), float(step))


def lines(shown: Picture | None, width: int, height: int | None, trouble: str = "") -> list[str]:
    return [line.plain for line in frame(shown, Size(width, height), URL, trouble)]


def test_reads_what_a_sidecar_tells() -> None:
    dispatcher = make_dispatcher()
    dispatcher.report(report(2, running=3, waiting=1, tokens=500, capacity_tokens=1000), 1.0)
    dispatcher.handle(query([keyed("a")]), 1.0)
    body = msgspec.json.encode(status_of(dispatcher, Health(), 2.0))
    told = msgspec.json.decode(body, type=Status)
    (one,) = told.instances
    assert told.policy == "prefix_affinity"
    assert told.query_time.counts and told.query_time.bounds_us
    assert sum(sum(counts.values()) for counts in one.decisions.values()) == 1
    second = one.ranks[2]
    assert (second.running, second.waiting, second.report_age_seconds) == (3, 1, 1.0)
    assert second.capacity_tokens == 1000
    assert one.ranks[0].running is None


def test_rates_are_differences() -> None:
    flow = seen().flow
    assert flow.decisions == 110  # 87 + 6 + 3 + 12 + 1 and a fallback
    assert flow.hit == pytest.approx(100 / 110)
    assert flow.spill == pytest.approx(3 / 110)
    assert flow.fallback == pytest.approx(1 / 110)
    assert flow.bypass == pytest.approx(5 / 1105)
    assert flow.p50_us is not None and 10 < flow.p50_us < 20
    shown = seen()
    assert shown.ranks["gpu-1:30000", 3].requests == 3
    assert shown.ranks["gpu-1:30000", 0].cache_hit == pytest.approx(0.4)
    assert shown.round_trips["gpu-1:30000"][0] == pytest.approx(158.5)  # 8.5 of 50 into 150 to 200


def test_hits_are_reasons() -> None:
    assert HITS <= REASONS


def test_the_first_answer_has_no_rates() -> None:
    shown = History().add(5.0, at(3))
    assert shown.flow.decisions is None
    assert any(line.startswith("-/s") for line in lines(shown, 80, 24))


def test_history_keeps_one_window() -> None:
    history = History(window=10)
    for step in range(30):
        shown = history.add(float(step), at(step))
    assert shown.span == 10
    shown = history.add(100.0, at(100))
    assert shown.span == 71  # the answer before it is what there is to compare with


@pytest.mark.parametrize("change", [{"pid": 1}, {"uptime_seconds": 1.0}])
def test_another_process_begins_anew(change: dict[str, Any]) -> None:
    history = History()
    history.add(0.0, at(5))
    assert history.add(1.0, at(6, **change)).flow.decisions is None


def test_counters_that_began_anew_count_from_zero() -> None:
    assert since(5, 7) == 2
    assert since(7, 2) == 2
    shown = picture(at(9), at(1), 1.0)
    assert shown.flow.bypass is not None and 0 <= shown.flow.bypass <= 1
    assert all(flow.requests is not None and flow.requests >= 0 for flow in shown.ranks.values())


def test_quantiles() -> None:
    bounds = [10.0, 20.0, 50.0]
    assert quantile(bounds, [0, 0, 0, 0], 0.5) is None
    assert quantile(bounds, [10, 0, 0, 0], 0.5) == 5
    assert quantile(bounds, [0, 10, 0, 0], 0.99) == pytest.approx(19.9)
    assert quantile(bounds, [1, 0, 0, 9], 0.5) == math.inf
    assert text.micros(math.inf, 20000) == ">20ms"


@given(st.text(max_size=40))
def test_what_a_peer_named_is_harmless(name: str) -> None:
    for hostile in (name, "\x1b[2J" + name, "\x9b\u202e\u200b\n\r\t" + name):
        clean = text.clean(hostile)
        assert clean.isprintable() or not clean
        assert len(clean) == len(hostile)
    assert text.clean("host-1:30000 ä日本") == "host-1:30000 ä日本"


@given(st.floats(0, 1e15))
def test_numbers_fit_their_columns(value: float) -> None:
    assert len(text.count(value)) <= 5 or value >= 999e12
    assert len(text.rate(value)) <= 6 or value >= 999e12
    assert len(text.seconds(value)) <= 6 or value >= 9999 * 86400
    assert len(text.percent(min(1.0, value))) <= 4


def test_numbers() -> None:
    told = [text.count(n) for n in (None, 0, 999, 1000, 99_949, 812_000, 999_999, 1_048_576)]
    assert told == ["-", "0", "999", "1.0k", "99.9k", "812k", "1.0M", "1.0M"]
    assert [text.percent(n) for n in (None, 0, 0.004, 0.0994, 0.1, 1)] == [
        *("-", "0%", "0.4%", "9.9%", "10%", "100%")
    ]
    assert [text.seconds(n) for n in (None, 0.23, 59, 119, 120, 7200, 200_000)] == [
        *("-", "0.2s", "59s", "119s", "2m", "2h", "2d")
    ]


def test_a_frame_of_80x24() -> None:
    shown = lines(seen(), 80, 24)
    assert len(shown) <= 24
    assert max(map(cell_len, shown)) <= 80
    assert shown[0].startswith("kv_affinity version 3  canary prefix_affinity 10%")
    whole = "\n".join(shown)
    for part in ("110/s", "hit 91%", "spill 2.7%", "bypass 0.5%", "gpu-1:30000", "hook 0.3.0"):
        assert part in whole
    rows = [line.split() for line in shown if "/1.0M" in line]
    assert [int(row[0]) for row in rows] == list(range(8))
    assert shown[-1].startswith("q quit")


def test_320_ranks_show_the_busiest_and_count_the_rest() -> None:
    picture = seen(ranks=320)
    shown = lines(picture, 80, 24)
    assert len(shown) == 24
    rows = [line.split() for line in shown if "/1.0M" in line]
    loads = sorted((one.load for one in picture.status.instances[0].ranks), reverse=True)
    assert [int(row[1]) for row in rows] == loads[: len(rows)]
    assert any(f"{320 - len(rows)} more ranks" in line for line in shown)
    everything = lines(picture, 120, None)
    assert sum("/1.0M" in line for line in everything) == 320


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 9), st.integers(0, 12))
def test_every_size_fits(width: int, height: int, instances: int, ranks: int) -> None:
    told = [instance(f"日本 {n}\x1b[", ranks, 1) for n in range(instances)]
    shown = lines(picture(at(0, *told), at(1, *told), 1.0), width, height, "x" * 90)
    assert len(shown) <= max(height, 4)
    assert max(map(cell_len, shown)) <= max(width, 20)


def test_many_instances_share_the_room() -> None:
    told = [instance(f"host-{n}:30000", 64, 1) for n in range(3)]
    shown = lines(picture(at(0, *told), at(1, *told), 1.0), 100, 30)
    assert all(any(f"host-{n}:" in line for line in shown) for n in range(3))
    rows = sum("/1.0M" in line for line in shown)
    assert rows >= 12
    told = [instance(f"host-{n}:30000", 8, 1) for n in range(40)]
    shown = lines(picture(at(0, *told), at(1, *told), 1.0), 100, 30)
    assert any("of 40 instances hidden" in line for line in shown)


def test_what_is_unknown_down_or_stale_shows() -> None:
    told = instance("h", 0)
    unknown = dict.fromkeys(("running", "waiting", "report_age_seconds", "tokens"))
    told["ranks"] = [
        rank(0, **unknown, capacity_tokens=None),
        rank(1, live=False),
        rank(2, report_age_seconds=60.0),
    ]
    told["hook"]["breaker_open"] = True
    shown = frame(picture(at(0, told), at(1, told), 1.0), Size(80, 24), URL)
    rows = {line.plain.split()[0]: line for line in shown if line.plain[:5].strip().isdigit()}
    assert rows["0"].plain.count(" - ") >= 3
    assert "down" in rows["1"].plain
    assert any("red" in str(span.style) for span in rows["2"].spans)
    assert any("breaker open" in line.plain for line in shown)


def test_troubles_are_said_above_what_was_last_known() -> None:
    shown = lines(seen(), 40, 24, "Connection refused; for 3 s, asking on")
    assert "".join(shown).startswith("no sidecar at")
    assert any("gpu-1" in line for line in shown)
    assert "no sidecar" in lines(None, 80, 24, "Connection refused")[0]
    assert "asking" in lines(None, 80, 24)[0]
    alone = msgspec.structs.replace(at(1), instances=[])
    assert any("no instance" in line for line in lines(Picture(alone), 80, 24))


@pytest.mark.parametrize(
    "url",
    ["", "ftp://h", "127.0.0.1:9477", "http://", "http://h:99999", "http://h/?x", "http://h /\n"],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Source(url)


def test_where_the_settings_say() -> None:
    assert url_of("127.0.0.1", 9477) == URL
    assert url_of("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert url_of("::", 1) == "http://[::1]:1"
    with pytest.raises(ConfigError, match=r"admin\.port"):
        url_of("127.0.0.1", 0)


class Answers(BaseHTTPRequestHandler):
    """Says what the server was told to."""

    def do_GET(self) -> None:  # the base class wants this name
        code, body = self.server.answer  # type: ignore[attr-defined]
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *what: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[HTTPServer]:
    """An HTTP server that is no sidecar."""
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("code", "body", "says"),
    [
        (404, b"", "404"),
        (200, b"<html>", "not a sidecar"),
        (200, b"[]", "not a sidecar"),
        (200, b'{"policy": 1}', "not a sidecar"),
        (200, b"[" * 5000, "not a sidecar"),
        (200, b'{"policy": "a", "policy_version": 1%s}' % (b"0" * 400), "not a sidecar"),
        (200, b'{"policy": "\xff"}', "not a sidecar"),
    ],
)
def test_strangers_are_named(stranger: HTTPServer, code: int, body: bytes, says: str) -> None:
    stranger.answer = code, body  # type: ignore[attr-defined]
    with pytest.raises(ControlError, match=says):
        Source(f"http://127.0.0.1:{stranger.server_port}").fetch()


def test_once_prints_plain_text(
    stranger: HTTPServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger.answer = 200, msgspec.json.encode(status(instance("evil\x1b[2J", 8)))  # type: ignore[attr-defined]
    url = f"http://127.0.0.1:{stranger.server_port}"
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["top", "--once", "--interval", "0.1", "--url", url]) == 0
    printed = capsys.readouterr().out
    assert "evil?[2J" in printed
    assert "\x1b" not in printed
    assert all(len(line) <= 90 for line in printed.splitlines())


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--once"], 69, "no sidecar at http://127.0.0.1:"),
        (["--interval", "0"], 2, "--interval '0': must be 0.1 to 60"),
        (["--interval", "nan"], 2, "--interval"),
        ([], 2, "no terminal; --once"),
    ],
)
def test_what_cannot_be_done_is_said(
    flags: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", f"--admin-port={free_port()}", *flags]) == code
    printed = capsys.readouterr()
    assert says in printed.err
    assert not printed.out
