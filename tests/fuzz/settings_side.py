"""Settings: files, variables, keys. Only ConfigError and EndpointError may come of them."""

from collections.abc import Callable
from typing import Any

import msgspec
from zmq.utils import z85

from sglang_hook import settings as hook
from sidecar import config, curve, wire
from sidecar.catalog import Catalog
from sidecar.errors import ConfigError, EndpointError
from sidecar.gate import Gate
from sidecar.policies import REGISTRY
from sidecar.published.settings import publishers
from sidecar.steering import prepare
from tests.fuzz.places import nothing_installed, written
from tests.fuzz.source import EXTREMES, Source
from tests.fuzz.world import hold

KEYS = tuple(config.settings())
HOOK_VARIABLES = tuple(hook.ENV_PREFIX + name.upper() for name in hook.Settings.__struct_fields__)
VALUES = (
    *(str(number) for number in EXTREMES),
    *("nan", "-inf", "1e400", "-0.0", "true", "null", "", " ", "[]", "{}", '{"a": [1]}', '"a"'),
    *("[" * 3000, "9" * 5000, "kv_affinity", "prefix_affinity", "round_robin", "debug", "json"),
    *("ipc:///run/x.sock", "ipc://x", "tcp://1.2.3.4:5", "tcp://[::1]:65535", "tcp://:0"),
    *('{"a": "tcp://1.2.3.4:5-9,tcp://b:1"}', '{"a": "tcp://[::1]:1-65535"}', '{"\\ud800": ""}'),
    *("1979-05-27", "0x10", "0.5", "a:b", "{a = 1}", "'é'", "5", "0.1", "16"),
)
HOW_TOML = ("{}", "'{}'", '"{}"')


def _value(source: Source) -> str:
    return source.text() if source.flag(4) else source.one_of(VALUES)


def _toml(source: Source) -> bytes:
    if source.flag(4):
        return source.rest()
    lines = []
    for _ in range(1 + source.below(4)):
        key = source.one_of(KEYS)
        lines.append(f"{'.'.join(key.path)} = {source.one_of(HOW_TOML).format(_value(source))}")
    return "\n".join(lines).encode(errors="surrogateescape") + source.raw(source.below(16))


def _flat(source: Source, names: tuple[str, ...]) -> dict[str, str]:
    return {source.one_of(names): _value(source) for _ in range(source.below(4))}


def settings(data: bytes) -> None:
    """A file, variables and flags; what is accepted can be written and read again."""
    with nothing_installed():
        _settings(Source(data))


def _settings(source: Source) -> None:
    env = _flat(source, tuple(key.env for key in KEYS))
    flags = _flat(source, tuple(key.flag for key in KEYS))
    file = written("config.toml", _toml(source)) if not source.flag(4) else None
    try:
        loaded = config.load(file, env, flags)
        if {loaded.policy.name, loaded.policy.shadow.name, loaded.policy.canary.name} <= {
            "",
            *REGISTRY,
        }:
            prepare(Catalog(dict), loaded.policy)
        wire.check_endpoint(loaded.serve.endpoint, allow_tcp=True)
        told = publishers(loaded.published.endpoints, allow_tcp=True)
        hold(len(told) <= len(loaded.published.endpoints) * wire.MAX_RANKS, "too many publishers")
    except (ConfigError, EndpointError):
        return
    hold(msgspec.convert(msgspec.to_builtins(loaded), config.Config) == loaded, "out of bounds")
    try:
        text = config.render(loaded).encode()
    except UnicodeEncodeError:
        return  # a variable of the environment may hold bytes that no file of text can
    hold(config.load(written("rendered.toml", text), {}, {}) == loaded, "not what was written")


def environment(data: bytes) -> None:
    """Variables of the hook."""
    source = Source(data)
    env = _flat(source, HOOK_VARIABLES)
    if source.flag():
        env.setdefault("DP_SIDECAR_ENDPOINT", "ipc:///run/x.sock")
    try:
        loaded = hook.load(env)
    except (ConfigError, EndpointError):
        return
    hold(msgspec.convert(msgspec.to_builtins(loaded), hook.Settings) == loaded, "out of bounds")
    wire.check_report_endpoint(loaded.reports, allow_tcp=True)


PUBLIC, SECRET = (
    b"rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
    b"JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6",
)
"""The pair in the manual of zmq_curve(7)."""
OWN = curve.Pair(SECRET)
CLIENTS = frozenset({z85.decode(PUBLIC)})


class Verdicts:
    """The socket that libzmq asks over."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        """Note a verdict."""
        self.sent.append(frames)


def _read(read: Callable[[str, str], Any], text: bytes) -> None:
    try:
        read(written("key", text), "KEY")
    except ConfigError as error:
        shown = text.strip().decode("latin-1")
        hold(len(shown) < 8 or shown not in str(error), "an error that shows a key")


def keys(data: bytes) -> None:
    """Files of keys, and questions of libzmq's whether a client may connect."""
    source = Source(data)
    text = source.one_of((PUBLIC, b"#", b"", b"\xff", b"%" * 40, b"k")) + source.raw(60)
    _read(curve.read_secret, text)
    _read(curve.read_clients, text)
    gate = Gate(None, curve.ServerKeys(OWN, CLIENTS))  # type: ignore[arg-type]
    gate._zap = verdicts = Verdicts()  # type: ignore[assignment]
    raw = z85.decode(source.one_of((PUBLIC, SECRET)))
    frames = [b"1.0", b"1", b"query", b"1.2.3.4", b"", b"CURVE", raw][: source.below(9)]
    if source.flag():
        frames = [source.raw(source.below(33)) for _ in range(source.below(10))]
    gate._on_zap(frames)
    for verdict in verdicts.sent:
        good = len(frames) == 7 and frames[5] == b"CURVE" and frames[6] in CLIENTS
        hold((verdict[2] == b"200") == good, "a stranger let in, or a friend kept out")
    gate._on_event("query", [source.raw(6), source.rest()])
