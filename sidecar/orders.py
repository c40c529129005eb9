"""What is said on the control socket: orders to change the policy, and the answers."""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from sidecar.errors import ConfigError

# A hundred times what the longest list of parameters takes.
MAX_BODY_BYTES = 64 << 10


class Compared(Struct, frozen=True):
    """What a shadow would have done, beside what was done; both by the prefix index, since it
    began, all instances together."""

    requests: int
    agreed: int
    """Of those, requests that both sent to the same rank."""
    prompt_tokens: int
    expected_tokens: float
    """Prompt tokens that the shadow would have found cached, as the index expects."""
    expected_tokens_in_fact: float
    """The same of what was done."""
    spills: int
    spills_in_fact: int

    def __str__(self) -> str:
        return (
            f"same rank for {self.agreed:,} of {self.requests:,} requests; of "
            f"{self.prompt_tokens:,} prompt tokens {self.expected_tokens:,.0f} would have been "
            f"cached, in fact {self.expected_tokens_in_fact:,.0f} (expected, not measured); "
            f"{self.spills:,} spills, in fact {self.spills_in_fact:,}"
        )


class Trial(Struct, frozen=True, omit_defaults=True):
    """A second policy: the shadow, or with a share the canary."""

    name: str
    params: dict[str, Any]
    share: float = 0.0
    """Of the affinity keys, 0 to 1."""
    compared: Compared | None = None
    """Of a shadow."""


class PolicyState(Struct, frozen=True):
    """The policies at work, what the verbs answer. Grows at the tail; skip unknown fields."""

    name: str
    params: dict[str, Any]
    """All of them, with the values in force."""
    version: int
    """Counts the changes of policies in this process; the first is 1."""
    policies: list[str]
    """Names that `set_policy` takes."""
    canary: Trial | None = None
    shadow: Trial | None = None
    config: str = ""
    """The file that a reload reads; empty: none."""
    note: str = ""
    """What the last change had to say."""


class Change(Struct, frozen=True):
    """One line of `policy history`."""

    version: int
    at: float
    """Seconds since 1970."""
    what: str
    """start, set, reload, canary, canary_off, shadow or shadow_off."""
    policy: str
    params: dict[str, Any]
    share: float | None = None
    """Of a canary."""
    note: str = ""
    """What a shadow that ended had shown."""


class Parameter(Struct, frozen=True):
    """One parameter of a policy, as `policy list` shows it."""

    default: Any
    description: str = ""
    bounds: str = ""


class Listed(Struct, frozen=True):
    """One policy, as `policy list` shows it."""

    name: str
    origin: str
    """`built in`, the package that offers it, or `configuration`."""
    params: dict[str, Parameter] = {}
    error: str = ""
    """Why it cannot be used."""


class PolicyOrder(Struct, forbid_unknown_fields=True, frozen=True):
    """Body of a `policy set` and of a `policy shadow`."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    params: dict[str, Any] = {}
    """Those left out take the policy's defaults."""


class CanaryOrder(Struct, forbid_unknown_fields=True, frozen=True):
    """Body of a `policy canary`."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    share: Annotated[float, Meta(gt=0, le=1)]
    """Of the affinity keys."""
    params: dict[str, Any] = {}


class PathOrder(Struct, forbid_unknown_fields=True, frozen=True):
    """Body of a question where a session went."""

    key: Annotated[str, Meta(min_length=1)]
    """The routing key."""


T = TypeVar("T", bound=Struct)


def decode_order(body: bytes, kind: type[T]) -> T:
    """Read the body of an order. Raises ConfigError, which names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"body: {error}") from None
