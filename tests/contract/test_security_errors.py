"""An error of ours inside SGLang tells the log where it was, and nothing of the request."""

import logging

import pytest

from sglang_hook import scheduler_seam
from sglang_hook.wrapping import untold

from .conftest import generate

SECRET = "SECRET-routing-key"


def test_the_log_of_an_error_has_no_key_and_no_prompt(harness, caplog):
    def broken(dispatch):
        try:
            raise KeyError(dispatch.routing_key)
        except KeyError as error:
            raise ValueError(f"cannot read {dispatch!r}") from error

    harness.seam.chooser.choose_one = broken
    with caplog.at_level(logging.DEBUG):
        harness.dispatch(generate("a", SECRET, input_ids=[4711, 4712, 4713]))
        harness.dispatch(generate("b", [SECRET]), generate("c", {SECRET: 1}), generate("d", 7))
    assert harness.seam.chooser.bypassed["hook_error"] == 4
    assert "an error in the hook" in caplog.text
    assert "ValueError" in caplog.text and ", in broken" in caplog.text
    assert SECRET not in caplog.text
    assert "4712" not in caplog.text


@pytest.mark.parametrize("where", ["_count", "_see_prefill"])
def test_nor_has_that_of_a_scheduler(where, caplog, monkeypatch):
    class Seam(scheduler_seam.SchedulerSeam):
        def __init__(self) -> None:
            self._failed = self._blind = False

    def broken(*arguments):
        raise ValueError(SECRET)

    monkeypatch.setattr(Seam, where, broken)
    with caplog.at_level(logging.DEBUG):
        Seam().step([object()])
    assert "dp_sidecar: the load is not reported" in caplog.text
    assert "ValueError" in caplog.text
    assert SECRET not in caplog.text


def test_what_stands_for_an_error_has_its_place_and_no_cause():
    try:
        try:
            raise KeyError(SECRET)
        except KeyError:
            raise RuntimeError(SECRET)  # noqa: B904 - so that it has a context
    except RuntimeError as error:
        kind, instead, trace = untold(error)
        assert trace is error.__traceback__
    assert (kind.__name__, str(instead)) == ("Untold", "RuntimeError")
    assert instead.__cause__ is instead.__context__ is None
