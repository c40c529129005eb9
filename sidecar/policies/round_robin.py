"""Every rank in turn."""

from typing import ClassVar

import msgspec

from sidecar.loads import LoadView
from sidecar.policies.base import Choice, NoParams, Reason
from sidecar.policies.least_loaded import take_turns
from sidecar.wire import RequestFacts, Want


class RoundRobin:
    """SGLang's `round_robin`; skips ranks whose reports are stale while others report."""

    name: ClassVar[str] = "round_robin"
    Params: ClassVar[type[msgspec.Struct]] = NoParams

    def __init__(self, params: NoParams) -> None:
        self.params = params
        self.want = Want()

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        return Choice(take_turns(view, facts.tokens), Reason.ROUND_ROBIN)
