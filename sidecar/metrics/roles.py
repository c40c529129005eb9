"""Series of the policies by role: the active one, the canary, the shadow.

Expected and avoidable tokens are what a policy believes about the caches. `active` and `canary` are
what the deciding policy said itself, so nothing of one that cannot tell; `shadow` and `shadowed`
compare two policies by one index: what the shadow would have done, and what was done meanwhile.
"""

from collections.abc import Iterator

from sidecar.dispatcher import Dispatcher
from sidecar.metrics.families import Family, counter, gauge
from sidecar.tally import Role

_LABELS = ("instance", "role")
_COUNTERS = (
    ("role_requests", "Requests decided.", "requests"),
    ("role_spills", "Requests kept off their preferred rank.", "spills"),
    (
        "prompt_tokens",
        "Prompt tokens of the requests of which the policy tells what is cached.",
        "prompt_tokens",
    ),
    (
        "expected_cached_tokens",
        "Of those, tokens that the policy expected in the cache of the chosen rank.",
        "expected_tokens",
    ),
    (
        "avoidable_prefill_tokens",
        "Of those, tokens that another live rank was expected to hold beyond the chosen one.",
        "avoidable_tokens",
    ),
)


def role_families(dispatcher: Dispatcher) -> Iterator[Family]:
    """Who is at work, and what each role did."""
    yield from _policies(dispatcher)
    done = list(_done(dispatcher))
    for name, text, field in _COUNTERS:
        family = counter(name, text, _LABELS)
        for instance, role, did in done:
            family.add([instance, role], getattr(did, field))
        yield family
    yield from _comparisons(dispatcher)


def _policies(dispatcher: Dispatcher) -> Iterator[Family]:
    policies = gauge(
        "policy_info", "A policy at work, by role; the value is always 1.", ("policy", "role")
    )
    policies.add([dispatcher.active.name, "active"], 1)
    canary, shadow = dispatcher.canary, dispatcher.shadow
    if canary is not None:
        policies.add([canary.seat.name, "canary"], 1)
    if shadow is not None:
        policies.add([shadow.seat.name, "shadow"], 1)
    yield policies
    share = gauge("canary_share", "Share of the affinity keys that the canary decides, 0 to 1.")
    share.put("", 0 if canary is None else canary.share)
    yield share


def _done(dispatcher: Dispatcher) -> Iterator[tuple[str, str, Role]]:
    """(instance, role, what it did)."""
    for instance, tally in dispatcher.tallies.items():
        for role, did in tally.roles.items():
            yield instance, role, did
    if dispatcher.shadow is not None:
        for instance, found in dispatcher.shadow.comparisons.items():
            yield instance, "shadow", found.roles["shadow"]
            yield instance, "shadowed", found.roles["active"]


def _comparisons(dispatcher: Dispatcher) -> Iterator[Family]:
    decisions = counter(
        "shadow_decisions",
        "Requests that the shadow decided too; agrees: to the same rank, yes or no.",
        ("instance", "agrees"),
    )
    imbalance = gauge(
        "assigned_imbalance_ratio",
        "Most over mean of the prompt tokens lately given to a rank to compute; 1 is even.",
        _LABELS,
    )
    shadow, instances = dispatcher.shadow, dispatcher.budget.instances
    for name, found in shadow.comparisons.items() if shadow is not None else ():
        decisions.add([name, "yes"], found.agreed)
        decisions.add([name, "no"], found.disagreed)
        if name in instances:
            ranks = instances[name].view.ranks
            for role, of in (("shadow", "shadow"), ("shadowed", "active")):
                imbalance.add([name, role], found.assigned[of].imbalance(ranks))
    yield from (decisions, imbalance)
