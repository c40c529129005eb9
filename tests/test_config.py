"""Configuration: one table of defaults, four sources in order, errors that name key and bound."""

import json
from pathlib import Path

import msgspec
import pytest

from sidecar import config
from sidecar.config import Config
from sidecar.errors import ConfigError

EXAMPLE = Path(__file__).parent.parent / "deploy" / "config" / "sidecar.toml"
KEYS = list(config.settings())
# Another valid value for each key, as its file, flag or variable has it.
OTHER = {
    "serve.endpoint": "ipc:///tmp/x.sock",
    "serve.control": "/tmp/x.control",
    "serve.reports_tcp": "tcp://10.0.0.1:9478",
    "serve.curve_secret_key_file": "/etc/keys/sidecar.key_secret",
    "serve.curve_client_keys_file": "/etc/keys/hook.key",
    "serve.allow_insecure_tcp": True,
    "serve.stale_seconds": 2.5,
    "serve.max_instances": 3,
    "serve.drain_seconds": 0.0,
    "published.endpoints": {"one": "tcp://127.0.0.1:6000-6007"},
    "published.grace_ms": 40.0,
    "admin.host": "::1",
    "admin.port": 0,
    "log.level": "debug",
    "log.format": "json",
    "decision_log.directory": "/tmp/decisions",
    "decision_log.max_megabytes": 5,
    "admin.token_file": "/tmp/token",
    "policy.name": "round_robin",
    "policy.params": {"a": 1, "b": "c", "d": {"e": [1.5, True]}},
    "policy.shadow.name": "total_tokens",
    "policy.shadow.params": {"hash_tokens": 64},
    "policy.canary.name": "total_tokens",
    "policy.canary.share": 0.5,
    "policy.canary.params": {"hash_tokens": 64},
    "policy.kv_affinity.move_tokens": 1.0,
    "policy.kv_affinity.move_ratio": 3.0,
    "policy.kv_affinity.request_tokens": 2.0,
    "policy.kv_affinity.recent_weight": 0.5,
    "policy.kv_affinity.recent_seconds": 60.0,
    "policy.kv_affinity.block_tokens": 32,
    "policy.prefix_affinity.max_load_skew": 2.0,
    "policy.prefix_affinity.min_load_gap": 0.0,
    "policy.prefix_affinity.hash_tokens": 64,
    "policy.prefix_affinity.token_fallback": False,
    "policy.prefix_affinity.fallback": "round_robin",
}


def name_of(key: config.Key) -> str:
    return ".".join(key.path)


def value_of(loaded: Config, key: config.Key) -> object:
    value = loaded
    for part in key.path:
        value = getattr(value, part)
    return value


def text(value: object) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def written(tmp_path: Path, content: str | bytes, name: str = "sidecar.toml") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def toml(key: config.Key, value: object) -> str:
    if isinstance(value, dict):
        return f"[{'.'.join(key.path)}]\n" + "".join(
            f"{name} = {config._toml(part)}\n" for name, part in value.items()
        )
    shown = text(value) if isinstance(value, bool | int | float) else f'"{value}"'
    return f"[{'.'.join(key.path[:-1])}]\n{key.path[-1]} = {shown}\n"


def test_the_example_is_the_defaults() -> None:
    assert EXAMPLE.read_text() == config.render(Config())
    assert config.load(EXAMPLE, {}, {}) == Config() == config.load(None, {}, {})


def test_render_reads_back(tmp_path: Path) -> None:
    for key in KEYS:
        loaded = config.load(None, {}, {key.flag: text(OTHER[name_of(key)])})
        assert config.load(written(tmp_path, config.render(loaded)), {}, {}) == loaded


@pytest.mark.parametrize("odd", ['a"b\\c', "tab\tnew\nline", "\x7f\x01", "é🦊", "'''", "# x"])
def test_render_quotes_strings(tmp_path: Path, odd: str) -> None:
    loaded = config.load(None, {"DP_SIDECAR_ADMIN_HOST": odd}, {})
    assert loaded.admin.host == odd
    assert config.load(written(tmp_path, config.render(loaded)), {}, {}) == loaded


def test_every_key_has_its_own_flag_and_variable() -> None:
    assert {name_of(key) for key in KEYS} == set(OTHER)
    assert len({key.flag for key in KEYS}) == len({key.env for key in KEYS}) == len(KEYS)
    for key in KEYS:
        assert key.description
        assert key.flag.startswith("--") and "_" not in key.flag and key.flag.islower()
        # The hook has a secret key of its own: tests/test_curve.py.
        section = "SERVE_" if name_of(key) == "serve.curve_secret_key_file" else ""
        words = key.flag.removeprefix("--").replace("-", "_").upper()
        assert key.env == f"DP_SIDECAR_{section}{words}"
    flags = {name_of(key): key.flag for key in KEYS}
    assert flags["serve.endpoint"] == "--endpoint"
    assert flags["admin.port"] == "--admin-port"
    assert flags["policy.name"] == "--policy"
    name = "prefix_affinity.max_load_skew"
    assert flags[f"policy.{name}"] == "--prefix-affinity-max-load-skew"


@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_every_source_sets_every_key_and_no_other(tmp_path: Path, key: config.Key) -> None:
    other = OTHER[name_of(key)]
    assert other != key.default
    file = written(tmp_path, toml(key, other))
    for sources in (
        (file, {}, {}),
        (None, {key.env: text(other)}, {}),
        (None, {}, {key.flag: text(other)}),
    ):
        loaded = config.load(*sources)
        assert value_of(loaded, key) == other
        assert [k for k in KEYS if value_of(loaded, k) != k.default] == [key]


@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_flag_before_variable_before_file_before_default(tmp_path: Path, key: config.Key) -> None:
    default, other = text(key.default), text(OTHER[name_of(key)])
    in_file = written(tmp_path, toml(key, OTHER[name_of(key)]))
    as_default = written(tmp_path, toml(key, key.default), "default.toml")
    for file, env, flags, expected in (
        (in_file, {}, {}, other),
        (in_file, {key.env: default}, {}, default),
        (in_file, {key.env: default}, {key.flag: other}, other),
        (in_file, {}, {key.flag: default}, default),
        (as_default, {key.env: other}, {}, other),
        (as_default, {key.env: other}, {key.flag: default}, default),
    ):
        assert text(value_of(config.load(file, env, flags), key)) == expected


def test_sources_add_up(tmp_path: Path) -> None:
    file = written(tmp_path, "[policy.prefix_affinity]\nhash_tokens = 64\n[serve]\nmax_instances=2")
    env = {"DP_SIDECAR_PREFIX_AFFINITY_MAX_LOAD_SKEW": "3", "HOME": "/", "DP_SIDECAR_OTHER": "1"}
    loaded = config.load(file, env, {"--prefix-affinity-min-load-gap": "7"})
    affinity = loaded.policy.prefix_affinity
    assert (affinity.hash_tokens, affinity.max_load_skew, affinity.min_load_gap) == (64, 3.0, 7.0)
    assert loaded.serve.max_instances == 2
    assert loaded.policy.in_force() == msgspec.to_builtins(loaded.policy.kv_affinity)
    other = config.load(file, env, {"--policy": "prefix_affinity"}).policy
    assert other.in_force() == msgspec.to_builtins(other.prefix_affinity)
    assert config.load(None, {}, {"--policy": "round_robin"}).policy.in_force() == {}


NUMBERS = {
    "serve.stale_seconds": (0.05, 3601, "0.1", "3600"),
    "serve.max_instances": (0, 4097, "1", "4096"),
    "serve.drain_seconds": (-0.1, 60.5, "0", "60"),
    "published.grace_ms": (-1, 60001, "0", "60000"),
    "admin.port": (-1, 65536, "0", "65535"),
    "policy.kv_affinity.move_tokens": (-1, 1e10, "0", "1000000000"),
    "policy.kv_affinity.move_ratio": (0.9, 1e7, "1", "1000000"),
    "policy.kv_affinity.request_tokens": (-1, 1e7, "0", "1000000"),
    "policy.kv_affinity.recent_weight": (-0.1, 1e4, "0", "1000"),
    "policy.kv_affinity.recent_seconds": (0.5, 86401, "1", "86400"),
    "policy.kv_affinity.block_tokens": (0, 65537, "1", "65536"),
    "policy.prefix_affinity.max_load_skew": (0.99, 1e7, "1.0", "1000000"),
    "policy.prefix_affinity.min_load_gap": (-0.1, 1e7, "0.0", "1000000"),
    "policy.prefix_affinity.hash_tokens": (0, 2**20 + 1, "1", "1048576"),
}
BAD = [
    *[(name, row[side], row[2 + side]) for name, row in NUMBERS.items() for side in (0, 1)],
    *[(name, value, "") for name in NUMBERS for value in ("nan", "inf", "-inf", "many", "")],
    *[(name, "maybe", "bool") for name, value in OTHER.items() if isinstance(value, bool)],
    ("admin.host", "", "1"),
    ("log.level", "loud", "debug, info, warning, error"),
    ("log.format", "xml", "text, json"),
    (
        "policy.name",
        "nonsense",
        "kv_affinity, prefix_affinity, round_robin, total_requests, total_tokens",
    ),
    ("policy.name", "", "prefix_affinity, round_robin"),
    ("policy.prefix_affinity.fallback", "random", "round_robin, total_requests, total_tokens"),
]


@pytest.mark.parametrize("source", ["file", "environment", "flag"])
@pytest.mark.parametrize(("name", "value", "bound"), BAD)
def test_bad_values_are_named(
    tmp_path: Path, name: str, value: object, bound: str, source: str
) -> None:
    key = next(key for key in KEYS if name_of(key) == name)
    content = toml(key, value)
    if value in ("nan", "inf", "-inf"):
        content = content.replace('"', "")  # TOML has these as numbers
    file = written(tmp_path, content if source == "file" else "")
    env = {key.env: text(value)} if source == "environment" else {}
    flags = {key.flag: text(value)} if source == "flag" else {}
    with pytest.raises(ConfigError) as caught:
        config.load(file, env, flags)
    assert name in str(caught.value)
    assert bound in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[serve]\nendpoint = 5", ["serve.endpoint", "str"]),
        ("[serve]\nallow_insecure_tcp = 1", ["serve.allow_insecure_tcp", "bool"]),
        ('[serve]\nmax_instances = "3"', ["serve.max_instances", "int"]),
        ("[serve]\nmax_instances = 1.5", ["serve.max_instances", "int"]),
        ("[admin]\nport = true", ["admin.port", "int"]),
        ("[admin]\nport = [1]", ["admin.port", "int"]),
        ("[policy]\nname = 5", ["policy.name", "str"]),
        ("[policy]\nprefix_affinity = 5", ["policy.prefix_affinity"]),
        ("serve = 5", ["serve"]),
        ("[[serve]]\n", ["serve"]),
        ("[serve]\nendpoit = 'x'", ["endpoit", "serve"]),
        ("[policy.prefix_affinity]\nskew = 2", ["skew", "policy.prefix_affinity"]),
        ("[policy.round_robin]\nx = 2", ["round_robin", "policy"]),
        ("[server]\nport = 1", ["server"]),
        ("port = 1", ["port"]),
        ("[serve]\nendpoint = x\n", ["line 2"]),
        ("[serve]\n[serve]\n", ["serve"]),
        (b"[serve]\nendpoint = '\xff'", ["utf-8"]),
        (b"\xff\xfe[\0", ["utf-8"]),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: str | bytes, words: list[str]) -> None:
    file = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        config.load(file, {}, {})
    assert not [word for word in [str(file), *words] if word not in str(caught.value)]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            config.load(path, {}, {})
