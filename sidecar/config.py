"""All settings: one frozen struct, one table of defaults, validated once.

Precedence: flag, environment, file, default. The default file in deploy/config/, the flags, their
help and the names of the environment variables are all made from the structs below.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from sidecar.catalog import is_spec, offered
from sidecar.errors import ConfigError
from sidecar.policies import REGISTRY
from sidecar.policies.kv_affinity import KvAffinityParams
from sidecar.policies.prefix_affinity import PrefixAffinityParams
from sidecar.published.settings import PublishedConfig, publishers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "DP_SIDECAR_"
WHOLE = ("params", "endpoints")
"""Tables that a later source replaces: parameters of one policy are none of another's."""


class ServeConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    endpoint: Annotated[
        str,
        Meta(
            description="Query socket, ipc://PATH or tcp://HOST:PORT; load reports go to "
            "PATH.reports or the next port"
        ),
    ] = "ipc:///run/sglang-dp-sidecar/query.sock"
    control: Annotated[
        str,
        Meta(
            description="Path of the control socket; empty: PATH.control beside an ipc:// "
            "endpoint, none with a tcp:// one"
        ),
    ] = ""
    reports_tcp: Annotated[
        str,
        Meta(
            description="tcp://HOST:PORT where load reports of other nodes come in, beside those "
            "of this one; empty: nowhere"
        ),
    ] = ""
    curve_secret_key_file: Annotated[
        str,
        Meta(
            description="The sidecar's secret CURVE key, see `keygen`; with it every tcp:// "
            "address is encrypted and guarded"
        ),
    ] = ""
    curve_client_keys_file: Annotated[
        str,
        Meta(
            description="Public CURVE keys that may connect, one a line; needed with a secret key"
        ),
    ] = ""
    allow_insecure_tcp: Annotated[
        bool,
        Meta(description="Accept tcp:// without CURVE keys, neither encrypted nor guarded"),
    ] = False
    stale_seconds: Annotated[
        float,
        Meta(
            ge=0.1,
            le=3600,
            description="A rank without a load report for this long is avoided while others report",
        ),
    ] = 5.0
    max_instances: Annotated[
        int, Meta(ge=1, le=4096, description="SGLang servers served at a time")
    ] = 64
    drain_seconds: Annotated[
        float, Meta(ge=0, le=60, description="Longest time to answer what is queued when stopping")
    ] = 1.0


class AdminConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    host: Annotated[
        str, Meta(min_length=1, description="Address of /metrics, /healthz, /readyz, /status")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Its port; 0: no HTTP at all")] = 9477
    token_file: Annotated[
        str,
        Meta(
            description="File (mode 0600) with the token that opens the control verbs under "
            "/control on that port; empty: only the control socket has them"
        ),
    ] = ""


class LogConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe line logged")
    ] = "info"
    format: Annotated[
        Literal["text", "json"], Meta(description="One line an event, as text or as JSON")
    ] = "text"


class DecisionLogConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    directory: Annotated[
        str,
        Meta(
            description="Where every decision is kept with what it was made from, for `replay` and "
            "`explain`; routing keys by keyed hash only; empty: nowhere"
        ),
    ] = ""
    max_megabytes: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Most that all its files take; the oldest go first")
    ] = 1024


PolicyName = Annotated[str, Meta(max_length=256)]
Params = dict[str, Any]


class ShadowConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: Annotated[
        PolicyName,
        Meta(description="Policy that decides every request too, without acting; empty: none"),
    ] = ""
    params: Annotated[Params, Meta(description="Its parameters; those left out take defaults")] = {}


class CanaryConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: Annotated[
        PolicyName,
        Meta(description="Policy that decides for a share of the affinity keys; empty: none"),
    ] = ""
    share: Annotated[
        float, Meta(ge=0, le=1, description="That share: 0.05 is one key in twenty")
    ] = 0.05
    params: Annotated[Params, Meta(description="Its parameters; those left out take defaults")] = {}


class PolicyConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: Annotated[
        PolicyName,
        Meta(
            description="Policy in force: "
            + ", ".join(REGISTRY)
            + ", one that a package offers, or module:Class"
        ),
    ] = "kv_affinity"
    params: Annotated[
        Params, Meta(description="Parameters of a policy that is not one of ours")
    ] = {}
    kv_affinity: KvAffinityParams = KvAffinityParams()
    prefix_affinity: PrefixAffinityParams = PrefixAffinityParams()
    shadow: ShadowConfig = ShadowConfig()
    canary: CanaryConfig = CanaryConfig()

    def in_force(self) -> Params:
        """Parameters of the policy in force. Raises ConfigError if they stand elsewhere."""
        if self.name not in REGISTRY:
            return self.params
        if self.params:
            raise ConfigError(
                f"policy.params: is for policies that are not ours; {self.name} has its own "
                f"section, [policy.{self.name}], if it has parameters"
            )
        section = getattr(self, self.name, None)
        return msgspec.to_builtins(section) if isinstance(section, msgspec.Struct) else {}

    def check(self) -> None:
        """Raises ConfigError for a name that nobody knows; imports nothing."""
        for key, name in (
            ("policy.name", self.name),
            ("policy.shadow.name", self.shadow.name),
            ("policy.canary.name", self.canary.name),
        ):
            empty = not name and key != "policy.name"
            if empty or name in REGISTRY or is_spec(name) or name in offered():
                continue
            known = ", ".join([*REGISTRY, *offered()])
            raise ConfigError(f"{key}: no policy {name!r}; there are {known}, and module:Class")


class Config(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Everything that `sglang-dp-sidecar serve` can be told."""

    serve: ServeConfig = ServeConfig()
    published: PublishedConfig = PublishedConfig()
    admin: AdminConfig = AdminConfig()
    log: LogConfig = LogConfig()
    decision_log: DecisionLogConfig = DecisionLogConfig()
    policy: PolicyConfig = PolicyConfig()


Loader = Callable[[], Config]
"""Reads the configuration again; raises ConfigError."""


class Key(msgspec.Struct, frozen=True):
    """One setting: where it stands and what it is called."""

    path: tuple[str, ...]
    default: Any
    description: str
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """`--endpoint`, `--admin-port`, `--policy`, `--prefix-affinity-max-load-skew`."""
        return "--" + self._words("-")

    @property
    def env(self) -> str:
        """`DP_SIDECAR_ENDPOINT`, `DP_SIDECAR_ADMIN_PORT`, ..."""
        # The hook has a secret of its own, under the short name, and `run` starts both.
        section = "SERVE_" if self.path[-1] == "curve_secret_key_file" else ""
        return ENV_PREFIX + section + self._words("_").upper()

    def _words(self, joint: str) -> str:
        # The keys of [serve] go without their section: --endpoint, which the hook reads too.
        short = self.path[1:] if self.path[0] == "serve" or len(self.path) > 2 else self.path
        if short[-1] == "name":
            short = short[:-1]
        return joint.join(short).replace("_", joint)


def settings(struct: type[msgspec.Struct] = Config, path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every setting, in the order of the file."""
    hints = get_type_hints(struct, include_extras=True)
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    for name, hint in hints.items():
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from settings(hint, (*path, name))
        else:
            meta = next(m for m in hint.__metadata__ if m.description)
            base = hint.__origin__
            choices = get_args(base) if get_origin(base) is Literal else ()
            default = {} if get_origin(base) is dict else fields[name].default
            yield Key((*path, name), default, meta.description, choices)


def load(
    file: str | os.PathLike[str] | None,
    env: Mapping[str, str],
    flags: Mapping[str, str],
) -> Config:
    """Build the configuration.

    file: TOML, or None; env: environment; flags: values by name of flag ("--admin-port").
    Raises ConfigError, which names the key and the bound.
    """
    config = _convert(_read(file) if file else {}, Config(), str(file), strict=True)
    for source, given in (("environment", env), ("flag", flags)):
        config = _convert(_overrides(source, given), config, source, strict=False)
    config.policy.check()
    publishers(config.published.endpoints, allow_tcp=config.serve.allow_insecure_tcp)
    return config


def _overrides(source: str, given: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a flat source as a tree."""
    tree: dict[str, Any] = {}
    for key in settings():
        name = key.env if source == "environment" else key.flag
        if name not in given:
            continue
        node = tree
        for part in key.path[:-1]:
            node = node.setdefault(part, {})
        if key.choices or not isinstance(key.default, str):
            _check_text(name, given[name])
        node[key.path[-1]] = _table(name, given[name]) if key.default == {} else given[name]
    return tree


def _check_text(name: str, text: str) -> None:
    """Only a path may have bytes that are not UTF-8. Raises ConfigError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name}: is not UTF-8") from None


def _table(name: str, text: str) -> Any:
    """A table in a flag or a variable: a JSON object. Raises ConfigError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: is not a JSON object: {error}") from None


def _read(file: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        # tomllib raises more than its own error: for nesting, for numbers of thousands of digits.
        raise ConfigError(f"{file}: {error}") from None


def _convert(tree: dict[str, Any], base: Config, source: str, *, strict: bool) -> Config:
    """Lay `tree` over `base`; `strict=False` reads numbers and booleans from text."""
    try:
        checked = msgspec.convert(tree, Config, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error), source)}") from None
    merged = _merge(msgspec.to_builtins(base), _only(tree, msgspec.to_builtins(checked)))
    return msgspec.convert(merged, Config)


def _explain(error: str, source: str) -> str:
    """msgspec's message, with the name in the source and the choices where there are some."""
    error = error.replace("`$.", "`")
    for key in settings():
        if error.endswith(f"`{'.'.join(key.path)}`"):
            name = {"flag": key.flag, "environment": key.env}.get(source)
            error += f" ({name})" if name else ""
            error += f", one of {', '.join(key.choices)}" if key.choices else ""
            break
    return error


def _only(shape: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The entries of `values` that `shape` has too."""
    return {
        name: _only(part, values[name])
        if isinstance(part, dict) and name not in WHOLE
        else values[name]
        for name, part in shape.items()
    }


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, part in over.items():
        whole = name in WHOLE
        merged[name] = part if whole or not isinstance(part, dict) else _merge(merged[name], part)
    return merged


def render(config: Config) -> str:
    """The configuration as a commented TOML file; `load` reads it back unchanged."""
    lines: list[str] = []
    section: tuple[str, ...] = ()
    values = msgspec.to_builtins(config)
    for key in settings():
        if key.path[:-1] != section:
            section = key.path[:-1]
            lines += ["", f"[{'.'.join(section)}]"]
        value = values
        for part in key.path:
            value = value[part]
        lines += [f"# {key.description}. {key.flag}, {key.env}", f"{key.path[-1]} = {_toml(value)}"]
    return "\n".join(lines).lstrip() + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # A JSON string, number or boolean is a TOML one, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
