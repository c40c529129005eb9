"""What a policy is: it orders the ranks, a guard admits them, a reason says what happened."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from sidecar.loads import LoadView
from sidecar.wire import LoadReport, RequestFacts, Want


class Reason:
    """Why a rank was chosen; each is a value of the metric label `reason`.

    Plain strings: hashing an Enum member is a Python call, and every decision counts its reason.
    """

    AFFINITY_HIT = "affinity_hit"
    """The rank preferred by the routing key."""
    PLACED = "placed"
    """Nobody holds a useful part of it: the rank that costs least."""
    PREFIX_HIT = "prefix_hit"
    """No key: the rank that holds the longest useful prefix of the prompt."""
    REPLICA_HIT = "replica_hit"
    """Another rank that holds nearly as much as the preferred one, which was busier."""
    PREFIX_SPILL = "prefix_spill"
    """No key: a rank that holds less of the prompt, as waiting for the preferred one costs more."""
    SPILL = "spill"
    """A later candidate: the guard found the preferred rank overloaded."""
    STALE_SKIP = "stale_skip"
    """A later candidate: the preferred rank's load reports are stale."""
    TOKEN_AFFINITY_HIT = "token_affinity_hit"
    TOKEN_SPILL = "token_spill"
    TOKEN_STALE_SKIP = "token_stale_skip"
    """The same three for the token-prefix key."""
    FALLBACK = "fallback"
    """No affinity key: the load-aware method decided."""
    ROUND_ROBIN = "round_robin"
    LEAST_REQUESTS = "least_requests"
    LEAST_TOKENS = "least_tokens"
    POLICY_ERROR = "policy_error"
    """The policy failed; the rank with the fewest requests was taken."""


SPILLS = frozenset(
    {
        Reason.SPILL,
        Reason.STALE_SKIP,
        Reason.TOKEN_SPILL,
        Reason.TOKEN_STALE_SKIP,
        Reason.PREFIX_SPILL,
    }
)
"""Reasons of requests that did not go to their preferred rank."""
REASONS = frozenset(value for name, value in vars(Reason).items() if name.isupper())


class Choice(NamedTuple):
    """A decision: positions in the load view, not rank ids."""

    position: int
    reason: str
    preferred: int = -1
    """Position of the preferred rank; -1 where there was no affinity key."""


class NoParams(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Parameters of a policy that has none."""


class Policy(Protocol):
    """Chooses a rank from facts and loads; keeps no state that a restart would miss."""

    name: ClassVar[str]
    Params: ClassVar[type[msgspec.Struct]]
    want: Want
    """What the hook must compute for this policy."""
    params: Any

    def __init__(self, params: Any) -> None: ...

    def choose(self, facts: RequestFacts, view: LoadView) -> Choice:
        """Choose a live rank for one request. `view` has at least one rank."""
        ...


class Learner(Protocol):
    """A policy that also remembers where requests went, instance by instance.

    What it remembers is a cache of what the hooks remember: after a restart of the sidecar they
    tell it again (`Want.history`).
    """

    def new_memory(self) -> Any:
        """The memory of an instance, empty; it stands in `LoadView.memory`."""
        ...

    def learn(self, facts: RequestFacts, rank: int, age: float | None, view: LoadView) -> None:
        """A request goes to a rank (age None), or went there `age` seconds before `view.now`."""
        ...

    def heard(self, report: LoadReport, view: LoadView, now: float) -> None:
        """A load report came at `now`, monotonic seconds."""
        ...


class Predictor(Protocol):
    """A policy that knows what the ranks have cached."""

    def expected(self, facts: RequestFacts, view: LoadView) -> dict[int, float]:
        """Rank id -> leading prompt tokens that it is expected to hold; no zeros."""
        ...


class Offer(NamedTuple):
    """How one rank stands, in the order of preference."""

    rank: int
    admitted: bool
    """Whether the policy's guard lets the request go there."""
    figures: dict[str, float]
    """What the policy goes by, by name with its unit: `load_requests`, `held_tokens`."""


class Explanation(NamedTuple):
    """A decision with all that it was made from."""

    choice: Choice
    preferred: int
    """Rank that the request belongs to; -1: none."""
    offers: list[Offer]
    """One for each live rank, the preferred first, as the policy would go through them."""
    limits: dict[str, float]
    """What the figures were held against."""


class Explainer(Protocol):
    """A policy that says why."""

    def explain(self, facts: RequestFacts, view: LoadView) -> Explanation:
        """What `choose` would decide now, and by what; changes nothing."""
        ...


LoadMethod = Callable[[LoadView, int], int]
"""Position of the rank that a load-aware method takes: (view, prompt tokens) -> position."""


def next_of(view: LoadView, tied: list[int]) -> int:
    """The first of the `tied` positions (ascending) after the rank chosen last, cyclically.

    So equals take turns, and a rank that left or came does not shift the others' turns.
    """
    ranks = view.ranks
    position = next((i for i in tied if ranks[i] > view.cursor), tied[0])
    view.cursor = ranks[position]
    return position
