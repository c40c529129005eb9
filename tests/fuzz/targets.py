"""Every target by name."""

from collections.abc import Callable
from typing import NamedTuple

from tests.fuzz import (
    control_side,
    hook_side,
    journal_side,
    log_side,
    prompt_side,
    published_side,
    settings_side,
    sidecar_side,
)


class Target(NamedTuple):
    """run: raises where a promise is broken; most: bytes of an input; share: of 1,000 runs."""

    run: Callable[[bytes], None]
    most: int
    share: int
    cost: int = 1
    """About how long an input takes, to begin with what takes longest."""
    kept: int = 18
    """Files of it that the corpus keeps at most, beside those of findings."""


TARGETS = {
    "query": Target(sidecar_side.query, 512, 220),
    "report": Target(sidecar_side.report, 256, 220),
    "dispatch": Target(sidecar_side.dispatch, 384, 15, 20),
    "log": Target(log_side.log, 256, 5, 20),
    "published": Target(published_side.published, 256, 5, 20),
    "answer": Target(hook_side.answer, 512, 130),
    "chooser": Target(hook_side.chooser, 384, 30, 10),
    "prompt": Target(prompt_side.prompt, 512, 12, 8),
    "telemetry": Target(prompt_side.telemetry, 128, 90),
    "verbs": Target(control_side.verbs, 256, 4, 10),
    "http": Target(control_side.http, 256, 50),
    "client": Target(control_side.client, 512, 80),
    "journal": Target(journal_side.journal, 512, 2, 20),
    "records": Target(journal_side.records, 384, 2, 20),
    "settings": Target(settings_side.settings, 256, 2, 20),
    "environment": Target(settings_side.environment, 128, 128),
    "keys": Target(settings_side.keys, 256, 5, 5),
}
