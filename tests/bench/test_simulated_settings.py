"""What the simulated scheduler is told by the environment, and how it names pages."""

from array import array

import pytest

from bench.model.steps import StepTimes, Work
from bench.simulated.pages import page_ids
from bench.simulated.settings import Settings, read_settings


def test_pages_are_told_apart_by_tokens_and_the_first_by_namespace() -> None:
    tokens = array("q", range(11))
    pages = page_ids(("a",), tokens, 4)
    assert len(pages) == 2
    assert page_ids(("a",), tokens, 4, 1) == pages[1:]
    other = page_ids(("b",), tokens, 4)
    assert (other[0] == pages[0], other[1] == pages[1]) == (False, True)
    assert page_ids(("a",), tokens, 16) == ()


def test_settings_are_the_models_and_mistakes_name_the_variable() -> None:
    settings = read_settings({"SIMULATED_TABLE": "DeepSeek-V3@h200", "SIMULATED_TIME_SCALE": "2"})
    assert (settings.table, settings.time_scale) == ("DeepSeek-V3@h200", 2.0)
    work = Work(False, 8, 0.0, 9)
    assert StepTimes(settings).seconds([work]) != StepTimes(Settings()).seconds([work])
    for name, value in (("TABLE", "none"), ("DECODE_SCALE", "fast"), ("SPEED", "1")):
        with pytest.raises(ValueError, match="SIMULATED_"):
            read_settings({f"SIMULATED_{name}": value})
