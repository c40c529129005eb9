"""Controllers and schedulers as a sidecar meets them: what it can know of who began with whom."""

from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.loads import JOINED_NS, TOGETHER_NS


@dataclass
class Bond:
    """A controller and a scheduler, as a sidecar met them."""

    pair: tuple[int, int]
    """Their epochs."""
    at: float
    one_start: bool
    """Whether they seem to be of one start of a server: their epochs are near each other, and
    either none before them were, or both are new, and neither was heard beside another new one."""
    clean: bool
    """Nothing was in flight, and all was told and reported."""
    behind: bool
    """The scheduler had reported requests that no query had told of. They count as received and,
    once told, as sent after the two were met: as in flight for good."""


def near(pair: tuple[int, int]) -> bool:
    """Whether the epochs of a controller and a scheduler tell of one start."""
    return -JOINED_NS <= pair[0] - pair[1] <= TOGETHER_NS


def new_start(known: Sequence[Bond], pair: tuple[int, int], spoke: float) -> bool:
    """Whether the pair after the `known` ones of that rank seems to be a start of both.

    spoke: when the process that is replaced was heard last.
    """
    if not near(pair):
        return False
    if not known or not near(known[-1].pair):
        return True
    new = len(known) > 1 and not set(pair) & set(known[-2].pair)
    return new and spoke <= known[-1].at
