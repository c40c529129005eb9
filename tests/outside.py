"""Policies from outside for the tests: sound ones, ones that fail, a package that offers one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from sidecar.loads import LoadView
from sidecar.policies import Choice
from sidecar.policies.base import NoParams
from sidecar.wire import RequestFacts, Want

SOUND = """
from typing import Annotated

from msgspec import Meta, Struct

from sidecar.policies import Choice, Reason
from sidecar.wire import Want

FIRST = 0
{more}

class Params(Struct, forbid_unknown_fields=True, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=9, description="How many")] = 3


class Mine:
    name = "{name}"
    Params = Params

    def __init__(self, params):
        self.params = params
        self.want = Want()

    def choose(self, facts, view):
        return Choice(FIRST, Reason.{reason})
"""


def sound(name: str = "mine", reason: str = "PLACED", more: str = "") -> str:
    """Source of a module with a policy `Mine` that sends everything to the first rank."""
    return SOUND.format(name=name, reason=reason, more=more)


def distribution(folder: Path, package: str, offers: dict[str, str]) -> None:
    """What pip leaves of a package that offers policies: entry point -> module:Class."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {spec}" for name, spec in offers.items()]
    text = "\n".join(["[sglang_dp_sidecar.policies]", *lines])
    (info / "entry_points.txt").write_text(text + "\n")


class Outside:
    """A policy whose parts a test gives it. A part that is an exception is raised."""

    name: ClassVar[str] = "outside"
    Params: ClassVar[type[msgspec.Struct]] = NoParams

    def __init__(self, choose: Any) -> None:
        self.params = NoParams()
        self.want = Want()
        self.answer = choose

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        answer = self.answer(facts, view) if isinstance(self.answer, Callable) else self.answer
        if isinstance(answer, BaseException):
            raise answer
        return answer


class OutsideLearner(Outside):
    """One that learns and predicts; each method is a call of a part that a test gives."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(parts.pop("choose", Choice(0, "placed")))
        self.parts = parts
        self.calls: list[str] = []

    def _do(self, part: str) -> Any:
        self.calls.append(part)
        answer = self.parts.get(part)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def new_memory(self) -> Any:
        return self._do("new_memory") or {}

    def learn(self, facts: Any, rank: int, age: float | None, view: LoadView) -> None:
        self._do("learn")

    def heard(self, report: Any, view: LoadView, now: float) -> None:
        self._do("heard")

    def expected(self, facts: Any, view: LoadView) -> Any:
        return self._do("expected")
