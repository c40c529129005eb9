"""The modelled server's parts: its bounds, who dispatches, what ranks tell, who steps together."""

from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from bench.model.request import Load, RankSpec
from bench.model.steps import StepParams, Work
from bench.workloads.base import Call


class ServerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The modelled server."""

    ranks: Annotated[int, Meta(ge=1, le=1024)] = 8
    lockstep: bool = True
    """DP attention: all ranks step together. False: plain DP, no barrier."""
    stall_seconds: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """Nothing is computed before this time, as after a start without warm-up."""
    report_delay_seconds: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    """How late our hook's load reports reach the sidecar."""
    cache_figures: bool = True
    """Whether load reports tell what was found in the prefix cache; older hooks do not."""
    rank: RankSpec = RankSpec()
    steps: StepParams = StepParams()


class Placement(NamedTuple):
    """Where a call goes, and why."""

    rank: int
    reason: str = ""
    preferred: int = -1


class Chooser(Protocol):
    """Whoever dispatches; sees the server through the `Cluster` it was made for."""

    def choose(self, call: Call, now: float) -> Placement:
        """The rank of a call that arrives at `now` (seconds)."""
        ...


class Snapshot(NamedTuple):
    """What a rank's scheduler last published."""

    at: float
    load: Load
    received_tokens: int = 0
    """Prompt tokens that the scheduler had taken in by then."""


class Seen(NamedTuple):
    """A rank at the start of its last step, as our hook reports it."""

    received: int
    """Requests taken in so far."""
    running: int
    waiting: int
    prefilling: int = 0
    """Prompt tokens still to be computed of the prompt in chunks."""
    admitted_tokens: int = 0
    """Prompt tokens of all requests whose prefill began so far."""
    cached_tokens: int = 0
    """Of those, tokens that were in the cache."""


class Group:
    """Ranks that step together."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.works: list[Work | None] = []
        self.steps = 0
        """Steps under way; 0: idle."""
        self.begun = 0.0
        self.each = 0.0
        """Seconds of one of them."""
        self.longer = 0.0
        """How much longer each further step takes, in seconds."""
        self.most = 0
        """For how many steps that is so."""
        self.version = 0
        self.stalled = False
        self.told: list[int] = []
        """Ranks whose prefill is over and not published yet."""

    def span(self, steps: int) -> float:
        """Seconds that the next `steps` steps take."""
        return steps * self.each + self.longer * steps * (steps - 1) / 2
