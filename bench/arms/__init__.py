"""Arms by name: `name` or `name:param=value:...`; adding one is a class and a line here."""

from functools import partial
from typing import Any

import msgspec

from bench.arms import reference, stock
from bench.arms.base import Arm, ArmError, Kind
from bench.arms.sidecar import SidecarChooser
from bench.model.cluster import Cluster
from bench.model.server import Chooser
from sidecar.errors import ConfigError
from sidecar.policies import REGISTRY, make_policy

KINDS: dict[str, type[Kind]] = {
    "round_robin": stock.RoundRobin,
    "total_requests": stock.TotalRequests,
    "total_tokens": stock.TotalTokens,
    "key_mod": reference.KeyMod,
    "first_tokens_mod": reference.FirstTokensMod,
    "prefix_affinity_token_guard": reference.TokenGuard,
    "chbl": reference.Chbl,
    "lmetric": reference.Lmetric,
    "least_waiting_uncached": reference.LeastWaitingUncached,
    "oracle": reference.Oracle,
}

# The sidecar's own policies; where SGLang has a method of the same name, ours says whose it is.
POLICIES = {(f"sidecar_{name}" if name in KINDS else name): name for name in REGISTRY}

ARMS = (*KINDS, *POLICIES)

__all__ = ["ARMS", "POLICIES", "Arm", "ArmError", "make_arm", "split_spec"]


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """`name:a=1:b=x` -> name and parameters as text. Raises ArmError."""
    name, *pairs = spec.split(":")
    params = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ArmError(f"arm {spec!r}: a parameter is written name=value, not {pair!r}")
        if key in params:
            raise ArmError(f"arm {spec!r}: {key} is given twice")
        params[key] = value
    return name, params


def make_arm(spec: str) -> Arm:
    """The arm that `spec` asks for. Raises ArmError, which names the field and its bound."""
    name, params = split_spec(spec)
    if name in POLICIES:
        return _policy_arm(spec, POLICIES[name], params)
    kind = KINDS.get(name)
    if kind is None:
        raise ArmError(f"arm {spec!r}: no arm {name!r}; there are {', '.join(ARMS)}")
    try:
        checked = msgspec.convert(params, kind.Params, strict=False)
    except msgspec.ValidationError as error:
        raise ArmError(_explain(spec, error, kind.Params)) from None

    def make(cluster: Cluster) -> Chooser:
        return kind(cluster, checked)

    return Arm(spec, kind.shared_cache, make)


def _explain(spec: str, error: Exception, params: type[msgspec.Struct]) -> str:
    names = ", ".join(params.__struct_fields__) or "none"
    return f"arm {spec!r}: {error}; its parameters: {names}"


def _policy_arm(spec: str, name: str, params: dict[str, str]) -> Arm:
    try:
        typed: dict[str, Any] = msgspec.to_builtins(
            msgspec.convert(params, REGISTRY[name].Params, strict=False)
        )
        make_policy(name, typed)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ArmError(_explain(spec, error, REGISTRY[name].Params)) from None
    return Arm(spec, shared_cache=False, make=partial(_choose_by_policy, name, typed))


def _choose_by_policy(name: str, params: dict[str, Any], cluster: Cluster) -> Chooser:
    return SidecarChooser(cluster, make_policy(name, params))
