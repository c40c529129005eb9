"""Log lines: one an event, text or JSON, with stable fields, at most one a period for each kind."""

import json
import logging
import os
import re
import select
from collections.abc import Iterator

import pytest

from sidecar.logs import JsonFormatter, RateLimit, TextFormatter, configure, logger


@pytest.fixture
def handler() -> Iterator[logging.Handler]:
    """Collects what is logged; logging is as before afterwards."""

    class Collector(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.lines.append(self.format(record))

    before, level, propagate = logger.handlers[:], logger.level, logger.propagate
    last_resort = logging.lastResort
    collector = Collector()
    logger.handlers[:] = [collector]
    logger.setLevel("INFO")
    yield collector
    logger.handlers[:] = before
    logger.setLevel(level)
    logger.propagate = propagate
    logging.lastResort = last_resort


def test_json_fields(handler: logging.Handler) -> None:
    handler.setFormatter(JsonFormatter())
    logger.info("took over from pid %d", 4711)
    (text,) = handler.lines
    line = json.loads(text)
    assert list(line) == ["time", "level", "pid", "event"]
    assert (line["level"], line["pid"]) == ("info", os.getpid())
    assert line["event"] == "took over from pid 4711"


def test_a_repeated_event_has_a_kind_and_says_how_many_were_left_out(
    handler: logging.Handler,
) -> None:
    now = [0.0]
    limit = RateLimit(period=10.0, clock=lambda: now[0])
    handler.setFormatter(JsonFormatter())
    for _ in range(1000):
        limit.warning("query/utf8", "query refused (utf8): ...")
        limit.warning("token", "/control: refused")
    now[0] = 10.0
    limit.warning("query/utf8", "query refused (utf8): ...")
    lines = [json.loads(line) for line in handler.lines]
    assert [(line["kind"], line["held"]) for line in lines] == [
        ("query/utf8", 0),
        ("token", 0),
        ("query/utf8", 999),
    ]
    assert lines[-1]["event"].endswith("(999 more like it not shown)")


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter("%(levelname)s %(message)s")])
@pytest.mark.parametrize("nasty", ["a\nINFO forged", "a\r\x1b[2J\x00", "a\x85b", "\x7f", "é\ud800"])
def test_one_line_an_event(
    formatter: logging.Formatter, nasty: str, handler: logging.Handler
) -> None:
    handler.setFormatter(formatter)
    logger.warning("query refused: %s", nasty)
    (text,) = handler.lines
    assert "\n" not in text
    assert "\r" not in text
    assert "\x1b" not in text


def test_a_traceback_stays_in_its_line(handler: logging.Handler) -> None:
    handler.setFormatter(JsonFormatter())
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("failed")
    (text,) = handler.lines
    assert "\n" not in text
    assert "ValueError: no" in json.loads(text)["traceback"]


def test_configuring_again_does_not_double_the_lines(
    handler: logging.Handler, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        configure("info", "json")
    logger.info("once")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["event"] == "once"


@pytest.fixture
def pipe(handler: logging.Handler, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard error is a pipe; its reading end."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        configure("info", "text")
        yield reading
    os.close(reading)


@pytest.mark.parametrize("size", [10, 3000, 200_000])
def test_a_pipe_that_nobody_reads_is_not_waited_for(pipe: int, size: int) -> None:
    for number in range(100_000 // size + 10):
        logger.warning("%d %s", number, "x" * size)
    os.set_blocking(pipe, False)
    while os.read(pipe, 1 << 20):
        if not select.select([pipe], [], [], 0)[0]:
            break
    logger.warning("read again")
    left_out, last = os.read(pipe, 1 << 20).decode().splitlines()
    assert re.search(r"WARNING .*: [1-9]\d* log lines left out", left_out)
    assert last.endswith("read again")


def test_lines_are_whole_while_somebody_reads(pipe: int) -> None:
    logger.warning("long %s end", "x" * 30_000)
    logger.info("surrogate \ud800")
    long, surrogate = os.read(pipe, 1 << 20).decode().splitlines()
    assert long.endswith("x end")
    assert surrogate.endswith("surrogate \\ud800")


def test_a_reader_that_is_gone_and_a_full_disk_harm_nobody(
    handler: logging.Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone, open("/dev/full", "w", encoding="utf-8") as full:
        for stream in (gone, full, None):
            monkeypatch.setattr("sys.stderr", stream)
            configure("info", "json")
            for _ in range(3):
                logger.warning("nobody reads this")
