"""Policies: one file each, one method, an explicit registry."""

from typing import Any

import msgspec

from sidecar.errors import ConfigError
from sidecar.policies.base import REASONS, SPILLS, Choice, Learner, Policy, Reason
from sidecar.policies.kv_affinity import KvAffinity
from sidecar.policies.least_loaded import TotalRequests, TotalTokens
from sidecar.policies.prefix_affinity import PrefixAffinity
from sidecar.policies.round_robin import RoundRobin

REGISTRY: dict[str, type[Policy]] = {
    "kv_affinity": KvAffinity,
    "prefix_affinity": PrefixAffinity,
    "round_robin": RoundRobin,
    "total_requests": TotalRequests,
    "total_tokens": TotalTokens,
}

__all__ = ["REASONS", "REGISTRY", "SPILLS", "Choice", "Learner", "Policy", "Reason", "make_policy"]


def make_policy(name: str, params: dict[str, Any] | None = None) -> Policy:
    """Build a policy from its name and parameters.

    Raises ConfigError, which names the unknown policy or parameter, or the bound it breaks.
    """
    policy = REGISTRY.get(name)
    if policy is None:
        raise ConfigError(f"policy.name: no policy {name!r}; there are {', '.join(REGISTRY)}")
    try:
        checked = msgspec.convert(params or {}, policy.Params)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy.params of {name}: {error}") from None
    return policy(checked)
