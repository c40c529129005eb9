"""Routing keys and prompts leave by no way: a recognisable key goes through everything there is."""

import base64
import contextlib
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sglang_hook.controller import Chooser, Dispatch
from sidecar import wire
from sidecar.cli import main
from sidecar.control import Control
from sidecar.errors import ControlError
from sidecar.hashing import key_hash
from sidecar.wire import Refusal
from tests.journal.test_writer import files, raw
from tests.processes import Asker, Sidecar, clean_env, short_directory, sidecar_process, wait_for
from tests.support import keyed, query, report
from tests.test_client import WRONG, Scripted, hooked
from tests.test_server import altered

KEY = "SECRETkey-of-nobody-4711"
OTHER = KEY + "-two"
LONG = KEY * 60
PREFIX_HASH = 0x5EC2E75EC2E75EC2

POLICIES = """
from sidecar.policies import Choice, Reason
from sidecar.policies.base import NoParams
from sidecar.wire import Want


class Base:
    Params = NoParams

    def __init__(self, params):
        self.params = params
        self.want = Want(prefix_tokens=4096)


class Raising(Base):
    name = "raising"

    def choose(self, facts, view):
        if b"SECRET" in facts.routing_key:
            raise ValueError(f"do not know {facts.routing_key!r} {facts!r}")
        return Choice(0, Reason.PLACED)


class Nonsense(Base):
    name = "nonsense"

    def choose(self, facts, view):
        if b"SECRET" in facts.routing_key:
            return Choice(facts.routing_key, facts.routing_key.decode(), 0)
        return Choice(0, Reason.PLACED)
"""


CONFIG = """
[policy]
name = "outsiders:Raising"

[policy.shadow]
name = "outsiders:Nonsense"
"""


def forms(key: str) -> list[bytes]:
    """How a key, or the hash that anybody can make of it, may be written."""
    data = key.encode()
    number = key_hash(data)
    written = [data, data.hex().encode(), base64.b64encode(data)[:20]]
    written += [str(number).encode(), b"%x" % number]
    return [*written, number.to_bytes(8, "little"), number.to_bytes(8, "big")]


FORMS = [form for key in (KEY, OTHER) for form in forms(key)]
FORMS += [b"%d" % PREFIX_HASH, b"%x" % PREFIX_HASH]
FORMS += [PREFIX_HASH.to_bytes(8, "big"), PREFIX_HASH.to_bytes(8, "little")]


def leaks(shown: dict[str, bytes]) -> list[tuple[str, bytes]]:
    """Where a key is to be seen, and in which form."""
    return [(place, form) for place, text in shown.items() for form in FORMS if form in text]


def everything_wrong(asker: Asker, push: Asker) -> list[str]:
    """Send the key where it does not belong; what was answered."""
    good = wire.encode(query([keyed(KEY)]))
    message = msgspec.msgpack.decode(good)
    payloads = [good[:-2], good + KEY.encode(), KEY.encode() * 1000, msgspec.msgpack.encode(KEY)]
    payloads += [
        wire.encode(query([keyed(LONG.encode())])),
        wire.encode(query([keyed(KEY)], ranks=[])),
    ]
    for value in (KEY, KEY.encode(), [KEY], {KEY: KEY}, {KEY: 1}, [[KEY.encode()]]):
        # Names of instances, causes and versions are for everybody to see: nobody puts a key there.
        places = set(range(len(message))) - {3, 9, 10, 11}
        payloads += [altered(good, place, value) for place in places]
        facts = message[8][0]
        changed = ([*facts[:n], value, *facts[n + 1 :]] for n in range(len(facts)))
        payloads += [altered(good, 8, [one]) for one in changed]
        payloads += [altered(good, 12, [[facts, value, 0]]), altered(good, 12, [[value, 1, 0]])]
        for place in (0, 1, *range(3, 19)):
            fields = wire.encode(report(1))
            push.send(altered(fields, place, value))
    answers = [asker.ask(payload) for payload in payloads]
    return [answer.detail for answer in answers if isinstance(answer, Refusal)]


def printed(*arguments: str) -> bytes:
    """Everything that a command prints, whatever comes of it."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(SystemExit),
    ):
        main(list(arguments))
    return (out.getvalue() + err.getvalue()).encode()


def told_over_control(control: Control) -> bytes:
    """Every verb, right and wrong, with the key where there is room for words."""
    said: list[Any] = [control.show(), control.list(), control.history(), control.where(KEY)]
    for wrong in (
        lambda: control.set_policy("prefix_affinity", {"max_load_skew": [KEY]}),
        lambda: control.set_policy("kv_affinity", {"move_tokens": {"a": KEY}}),
        lambda: control._call("POST", "/path", list, {"key": [KEY]}),
        lambda: control._call("POST", "/path", list, {"key": ""}),
    ):
        with pytest.raises(ControlError) as caught:
            wrong()
        said.append(str(caught.value))
    return repr(said).encode()


@pytest.fixture(scope="module")
def shown() -> Iterator[dict[str, bytes]]:
    """What a sidecar showed after all that, by place; its decision log is read too."""
    with short_directory() as directory:
        (directory / "outsiders.py").write_text(POLICIES)
        log = directory / "log"
        flags = ("--log-level=debug", f"--decision-log-directory={log}")
        env = clean_env(PYTHONPATH=str(directory))
        config = directory / "sidecar.toml"
        config.write_text(CONFIG)
        endpoint = f"ipc://{directory}/q"
        with sidecar_process(endpoint, *flags, config=config, env=env) as sidecar:
            found = driven(sidecar)
            assert sidecar.stop() == 0
            found["log"] = sidecar.log().encode()
        found["decision log"] = b"".join(map(raw, files(log)))
        sys.path.insert(0, str(directory))
        try:
            found |= read_again(log)
        finally:
            sys.path.remove(str(directory))
            sys.modules.pop("outsiders", None)
        yield found


def driven(sidecar: Sidecar) -> dict[str, bytes]:
    facts = [keyed(KEY), keyed(OTHER), wire.RequestFacts(b"", 0, 9, PREFIX_HASH)]
    past = [wire.Past(facts[1], 2, 5)]
    control = Control(f"{sidecar.path}.control", timeout=30)
    found: dict[str, bytes] = {}
    with (
        Asker(sidecar.endpoint) as asker,
        Asker(sidecar.endpoint + ".reports", zmq.PUSH) as push,
    ):
        details = everything_wrong(asker, push)
        for policy in ("", "prefix_affinity", "kv_affinity"):
            if policy:
                control.set_policy(policy)
            for _ in range(3):
                reply = asker.query(facts, history=past)
                assert len(reply.ranks) == 3
        wait_for(lambda: sidecar.metric("decision_log_records_total"))
        found["refusals"] = "\n".join(details).encode()
        found["control"] = told_over_control(control)
    for path in ("/metrics", "/status", "/paths", "/", "/healthz", f"/{KEY[:0]}nothing"):
        found[path] = sidecar.http(path)[1].encode()
    found["top"] = printed("top", "--once", "--url", f"http://127.0.0.1:{sidecar.port}")
    found["check"] = printed("check", f"--endpoint={sidecar.endpoint}", "--admin-port=0")
    return found


def read_again(log: Path) -> dict[str, bytes]:
    load = ["--load", "outsiders:Raising", "--load", "outsiders:Nonsense"]
    found = {
        "explain --key": printed("explain", str(log), "--key", KEY, *load),
        "explain --key --json": printed("explain", str(log), "--key", KEY, "--json", *load),
        "replay": printed("replay", str(log), *load),
        "replay --json": printed("replay", str(log), "--json", *load),
        "replay --policy": printed("replay", str(log), "--policy", "total_tokens", *load),
    }
    told = json.loads(found["explain --key --json"])
    for number, one in enumerate(told["requests"]):
        at = ["--at", one["at"], "--index", str(one["index"])]
        found[f"explain {number}"] = printed("explain", str(log), *at, *load)
        found[f"explain --json {number}"] = printed("explain", str(log), *at, "--json", *load)
    return found


def test_the_sidecar_shows_no_key_anywhere(shown: dict[str, bytes]) -> None:
    assert leaks(shown) == []


def test_that_test_has_seen_what_it_is_about(shown: dict[str, bytes]) -> None:
    """Else nothing would be shown because nothing happened."""
    assert shown["refusals"].count(b"\n") > 80
    assert b"policy raising failed: ValueError at outsiders.py:" in shown["log"]
    assert b"refused (field)" in shown["log"] and b"refused (malformed)" in shown["log"]
    assert b"DEBUG" in shown["log"] or b"ready: " in shown["log"]
    assert b'reason="policy_error"' in shown["/metrics"]
    assert b"key_hash" in shown["/paths"]
    assert b"round" in shown["top"] or b"kv_affinity" in shown["top"]
    assert b'"requests":' in shown["explain --key --json"]
    assert sum(place.startswith("explain") for place in shown) > 6
    assert len(shown["decision log"]) > 500
    assert b"compared" in shown["replay --json"]


def test_nor_does_the_hook(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is answered, and whoever answers."""
    with (
        short_directory() as directory,
        caplog.at_level(logging.DEBUG),
        Scripted(f"ipc://{directory}/q") as router,
        hooked(f"ipc://{directory}/q") as hook,
    ):
        chooser = Chooser("i", 1, {"sglang": "x"}, lambda: [0, 1, 2], 100)
        chooser.ask = hook.client.ask
        hook.client.probe = chooser.probe
        hook.client.heard = chooser.heard
        hook.meet()
        for script, _ in WRONG.values():
            router.script = script
            for key in (KEY, LONG, KEY + "\udcff"):
                hook.clock.now += 5.0
                assert chooser.choose_one(Dispatch(key, [1, 2, 3], (KEY, None, None))) in (0, 1, 2)
        assert leaks({"log": caplog.text.encode(errors="surrogateescape")}) == []
        assert leaks({"counts": repr((chooser.bypassed, chooser.abstained)).encode()}) == []
        assert len(chooser.bypassed) > 3
