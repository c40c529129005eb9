"""Log lines: one an event, text or JSON, with stable fields, at most one a period for each kind."""

import json
import logging
import os
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
    collector = Collector()
    logger.handlers[:] = [collector]
    logger.setLevel("INFO")
    yield collector
    logger.handlers[:] = before
    logger.setLevel(level)
    logger.propagate = propagate


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
