"""The policies there are: ours, those that packages offer, classes that the configuration names.

A package offers one as an entry point of the group GROUP; the configuration may name any class as
`module:Class`. What comes from outside is checked and tried before it decides anything.
"""

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import msgspec

from sidecar import wire
from sidecar.budget import Budget
from sidecar.errors import ConfigError, PolicyError
from sidecar.orders import Listed, Parameter
from sidecar.policies import REGISTRY, Policy, build
from sidecar.seat import FAULTS, Seat

GROUP = "sglang_dp_sidecar.policies"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")  # a label value of the metrics
_SPEC = re.compile(r"[\w.]+:\w+")
_LIMITS = (
    ("at least", "minimum"),
    ("more than", "exclusiveMinimum"),
    ("at most", "maximum"),
    ("less than", "exclusiveMaximum"),
)


class _Found(NamedTuple):
    origin: str
    policy: type[Policy]


class Catalog:
    """Policies by name. entry_points: {name: module:Class} with where they come from."""

    def __init__(
        self, entry_points: Callable[[], Mapping[str, tuple[str, str]]] | None = None
    ) -> None:
        self._entry_points = entry_points or offered
        self._found = {name: _Found("built in", policy) for name, policy in REGISTRY.items()}
        self._looked = False
        self._broken: dict[str, tuple[str, str]] = {}
        """name -> origin, error."""
        self._imported: set[str] = set()
        """Modules that are here for a policy only, so that they may be imported anew."""

    def make(self, name: str, params: Mapping[str, Any] | None = None) -> Policy:
        """A policy that is known. Raises ConfigError, which names the unknown name or the bound."""
        if name in self._broken:
            raise ConfigError(f"policy.name: {name}: {self._broken[name][1]}")
        found = self._found.get(name)
        if found is None:
            known = f"no policy {name!r}; there are {', '.join(self._found)}"
            only = "; module:Class is imported only where the configuration names it"
            raise ConfigError(f"policy.name: {known}{only if is_spec(name) else ''}")
        if found.origin == "built in":
            return build(found.policy, name, dict(params or {}))
        return _tried(found.policy, name, dict(params or {}))

    def configured(self, name: str, params: Mapping[str, Any] | None = None) -> Policy:
        """The same, for a name that stands in the configuration: `module:Class` is imported.

        Takes as long as an import does.
        """
        if _SPEC.fullmatch(name):
            found = _Found("configuration", _load(name, self._imported))
            self._found = {**self._found, name: found}  # others may be reading
        elif name not in self._found:
            self.refresh()
        return self.make(name, params)

    def look(self) -> None:
        """Refresh, if that has not been done yet."""
        if not self._looked:
            self.refresh()

    def refresh(self) -> None:
        """Look for what packages offer, and import anew what is known from outside."""
        importlib.invalidate_caches()
        broken: dict[str, tuple[str, str]] = {}
        kept = {n: f for n, f in self._found.items() if f.origin in ("built in", "configuration")}
        try:
            entries = self._entry_points()
        except Exception as error:  # noqa: BLE001 - one unsound package spoils those of all
            fault = f"the metadata of some package cannot be read: {type(error).__name__}"
            entries, broken["entry points"] = {}, ("packages", fault)
        for name, (spec, origin) in entries.items():
            if name in REGISTRY:
                broken[f"{name} ({origin})"] = (origin, "a policy of ours has that name")
                continue
            try:
                kept[name] = _Found(origin, _entry(name, spec, self._imported))
            except ConfigError as error:
                broken[name] = (origin, str(error).removeprefix("policy.name: "))
        self._found, self._broken, self._looked = kept, broken, True

    def names(self) -> list[str]:
        """Of those that can be used."""
        return list(self._found)

    def listing(self) -> list[Listed]:
        """Every policy, ours first."""
        good = [
            Listed(name, found.origin, parameters(found.policy.Params))
            for name, found in self._found.items()
        ]
        bad = [Listed(name, origin, error=error) for name, (origin, error) in self._broken.items()]
        return good + bad


def is_spec(name: str) -> bool:
    """Whether a policy's name says where its class is: `module:Class`."""
    return _SPEC.fullmatch(name) is not None


def offered() -> dict[str, tuple[str, str]]:
    """Entry points of the group: name -> `module:Class`, and the distribution that offers it.

    Where several offer one name, `module:Class` is empty.
    """
    # Late: a start that needs none of them does without.
    from importlib.metadata import entry_points

    found: dict[str, tuple[str, str]] = {}
    for entry in entry_points(group=GROUP):
        origin = entry.dist.name if entry.dist is not None else "unknown"
        spec, others = entry.value, ""
        if entry.name in found:
            spec, others = "", f"{found[entry.name][1]} and "
        found[entry.name] = (spec, others + origin)
    return found


def parameters(params: type[msgspec.Struct]) -> dict[str, Parameter]:
    """Parameters of a policy, from its struct."""
    schema = msgspec.json.schema(params)
    fields = schema["$defs"][params.__name__].get("properties", {})
    return {
        name: Parameter(field.get("default"), field.get("description", ""), _bounds(field))
        for name, field in fields.items()
    }


def _bounds(field: Mapping[str, Any]) -> str:
    """What a parameter may be, in words, from its JSON schema."""
    if "enum" in field:
        return "one of " + ", ".join(str(one) for one in field["enum"])
    limits = [(word, field[b]) for word, b in _LIMITS if b in field]
    whole = [(word, int(limit) if limit == int(limit) else limit) for word, limit in limits]
    return ", ".join(f"{word} {limit}" for word, limit in whole)


def _entry(name: str, spec: str, imported: set[str]) -> type[Policy]:
    """The class of an entry point. Raises ConfigError."""
    if not spec:
        raise ConfigError("several packages offer it; keep one")
    policy = _load(spec, imported)
    if policy.name != name:
        raise ConfigError(
            f"the entry point is {name!r}, the name of its class {policy.name!r}; call both the "
            "same, metrics tell it by the latter"
        )
    return policy


def _load(spec: str, imported: set[str]) -> type[Policy]:
    """The class at `module:Class`; what is in `imported` is imported anew. Raises ConfigError.

    A module of its own, not a reload: a policy that decides meanwhile keeps the globals it has, and
    if the new one is no good, nothing has changed.
    """
    if not is_spec(spec):
        raise ConfigError(f"policy.name: {spec!r} is not module:Class")
    module_name, _, class_name = spec.partition(":")
    if module_name not in sys.modules:
        imported.add(module_name)
    before = {}
    if module_name in imported:
        inner = f"{module_name}."
        before = {n: m for n, m in sys.modules.items() if n == module_name or n.startswith(inner)}
        for name in before:
            del sys.modules[name]
    try:
        policy = getattr(importlib.import_module(module_name), class_name, None)
        problem = _problem(policy)
    except FAULTS as error:  # an import runs anyone's code
        problem = f"{type(error).__name__}: {error}"
    if problem:
        sys.modules.update(before)
        raise ConfigError(
            f"policy.name: {spec}: {problem}; docs/policies.md shows how to write one"
        )
    return cast("type[Policy]", policy)


def _problem(policy: Any) -> str:
    """What keeps something from being the class of a policy; "": nothing."""
    if not isinstance(policy, type):
        return "there is no such class"
    name, params = getattr(policy, "name", None), getattr(policy, "Params", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"name is {name!r}, not 1 to 64 characters of a to z, 0 to 9 and _"
    if name in REGISTRY and policy is not REGISTRY[name]:
        return f"name is {name!r}, as one of ours; it must be its own, metrics tell it by that"
    if not (isinstance(params, type) and issubclass(params, msgspec.Struct)):
        return "Params is not a msgspec.Struct"
    if not callable(getattr(policy, "choose", None)):
        return "has no method choose(facts, view)"
    parameters(params)
    return ""


def _tried(kind: type[Policy], name: str, params: dict[str, Any]) -> Policy:
    """A policy from outside that has decided something sound. Raises ConfigError."""
    errors: list[BaseException] = []
    try:
        policy = build(kind, name, params)
        if type(policy.want) is not wire.Want or type(policy.params) is not kind.Params:
            raise TypeError("want is no Want, or params is not what it was made with")
        want = msgspec.convert(msgspec.to_builtins(policy.want), wire.Want)
        if policy.name != kind.name:
            raise TypeError(f"name is {policy.name!r}, that of its class {kind.name!r}")
        msgspec.json.encode(msgspec.to_builtins(policy.params))
        seat = Seat(policy, Budget(5.0, 1), errors.append)
        load = wire.LoadReport(wire.VERSION, "trial", 0, 1, 1, 0, 0, running=3, waiting=1)
        seat.report(load, 0.0)
        keyed = wire.RequestFacts(b"a session", tokens=100, last_rank=2, last_age_ms=1000)
        plain = wire.RequestFacts(tokens=5000)
        query = wire.Query(wire.VERSION, 1, "trial", 1, [0, 2], [0, 0], [0, 0], [keyed, plain])
        seat.meet(query, 1.0)
        for facts in query.requests:
            choice = seat.choose(facts)
            if choice is not None:
                seat.expected(facts, choice.position)
                seat.take(facts, choice.position)
    except ConfigError:
        raise
    except FAULTS as error:
        errors.append(error)
    if errors:
        first = errors[0].__cause__ if isinstance(errors[0], PolicyError) else errors[0]
        what = f"{type(first).__name__}: {first}"
        raise ConfigError(f"policy.name: {name}: fails on a trial request: {what}")
    if want.prefix_tokens == 0 and not want.block_tokens and want.history:
        raise ConfigError(f"policy.name: {name}: wants history without any hash of the prompts")
    return policy
