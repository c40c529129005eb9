"""Policies: one file each, one method, an explicit registry."""

from typing import Any

import msgspec

from sidecar.errors import ConfigError
from sidecar.policies.base import (
    REASONS,
    SPILLS,
    Choice,
    Explainer,
    Explanation,
    Learner,
    Offer,
    Policy,
    Predictor,
    Reason,
)
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

__all__ = [
    "REASONS",
    "REGISTRY",
    "SPILLS",
    "Choice",
    "Explainer",
    "Explanation",
    "KvAffinity",
    "Learner",
    "Offer",
    "Policy",
    "Predictor",
    "Reason",
    "build",
    "make_policy",
]


def make_policy(name: str, params: dict[str, Any] | None = None) -> Policy:
    """Build one of our policies from its name and parameters.

    Raises ConfigError, which names the unknown policy or parameter, or the bound it breaks.
    """
    policy = REGISTRY.get(name)
    if policy is None:
        raise ConfigError(f"policy.name: no policy {name!r}; there are {', '.join(REGISTRY)}")
    return build(policy, name, params)


def build(policy: type[Policy], name: str, params: dict[str, Any] | None = None) -> Policy:
    """Build a policy of that class, with its parameters checked. Raises ConfigError."""
    try:
        checked = msgspec.convert(params or {}, policy.Params)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy.params of {name}: {_explained(error, policy)}") from None
    return policy(checked)


def _explained(error: msgspec.ValidationError, policy: type[Policy]) -> str:
    """What is wrong with a parameter, by its name."""
    text = str(error).replace("`$.", "`")
    if "unknown field" not in text:
        return text
    names = ", ".join(policy.Params.__struct_fields__)
    return f"{text}; {f'it has {names}' if names else 'it has no parameters'}"
