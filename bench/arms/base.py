"""What an arm is: a name and a way to make its chooser for a cluster."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from bench.model.cluster import Cluster
from bench.model.server import Chooser, Placement
from bench.workloads.base import Call


class ArmError(ValueError):
    """No such arm, or a parameter that it does not take; the message names field and bound."""


class NoParams(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Parameters of an arm that has none."""


class Kind(ABC):
    """A family of choosers, made for a cluster with checked parameters."""

    Params: ClassVar[type[msgspec.Struct]] = NoParams
    shared_cache: ClassVar[bool] = False
    """Whether all ranks share one cache: no real server does, an upper bound may."""

    def __init__(self, cluster: Cluster, params: Any) -> None:
        self.cluster = cluster
        self.params = params
        self.size = len(cluster.ranks)

    @abstractmethod
    def choose(self, call: Call, now: float) -> Placement:
        """The rank of a call that arrives at `now` (seconds)."""


class Arm(msgspec.Struct, frozen=True):
    """An arm with its parameters, ready to be run."""

    name: str
    """As it was asked for: `name:param=value:...`."""
    shared_cache: bool
    make: Callable[[Cluster], Chooser]
