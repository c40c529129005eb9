"""A policy that is not ours."""

from typing import ClassVar

import msgspec

from sidecar.loads import LoadView
from sidecar.policies import Choice, Reason
from sidecar.policies.base import NoParams
from sidecar.wire import RequestFacts, Want


class Mine:
    """The rank with the highest id."""

    name: ClassVar[str] = "mine"
    Params: ClassVar[type[msgspec.Struct]] = NoParams

    def __init__(self, params: NoParams) -> None:
        self.params = params
        self.want = Want()

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        return Choice(len(view.ranks) - 1, Reason.PLACED)
