"""`[published]`: which addresses are which ranks, and what is refused."""

import pytest

from sidecar import config
from sidecar.errors import ConfigError
from sidecar.published.settings import PublishedConfig, Publisher, publishers

HOST = "127.0.0.1:30000"


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("tcp://127.0.0.1:6000", ["tcp://127.0.0.1:6000"]),
        ("tcp://localhost:6000-6002", [f"tcp://localhost:{p}" for p in (6000, 6001, 6002)]),
        ("tcp://[::1]:6000-6001", ["tcp://[::1]:6000", "tcp://[::1]:6001"]),
        ("tcp://127.9.9.9:1, ipc:///run/load", ["tcp://127.9.9.9:1", "ipc:///run/load"]),
    ],
)
def test_ranks_are_counted_through(text: str, addresses: list[str]) -> None:
    found = publishers({HOST: text}, allow_tcp=False)
    assert found == [Publisher(HOST, rank, at) for rank, at in enumerate(addresses)]


def test_ranks_of_another_node_go_on_counting() -> None:
    text = "tcp://node0:6000-6003,tcp://node1:6004-6007"
    found = publishers({HOST: text, "b": "tcp://node2:6000"}, allow_tcp=True)
    assert [one.rank for one in found] == [*range(8), 0]
    assert found[5] == (HOST, 5, "tcp://node1:6005")
    assert found[8] == ("b", 0, "tcp://node2:6000")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "begins with"),
        ("tcp://127.0.0.1", "a host and a port"),
        ("tcp://127.0.0.1:0", "a host and a port"),
        ("tcp://127.0.0.1:70000", "a host and a port"),
        ("tcp://127.0.0.1:6000-", "a host and a port"),
        ("tcp://127.0.0.1:6007-6000", "below the first"),
        ("tcp://127.0.0.1:1-65535", "65535 ranks, at most 1024"),
        ("tcp://*:6000", "name the host"),
        ("tcp://0.0.0.0:6000", "name the host"),
        ("tcp://[::]:6000", "name the host"),
        ("tcp://10.0.0.1:6000", "allow_insecure_tcp"),
        ("tcp://127.example.org:6000", "allow_insecure_tcp"),
        ("tcp://127.0.0.1.example.org:6000", "allow_insecure_tcp"),
        ("ipc://relative", "absolute"),
        ("ipc:///" + "x" * 200, "107"),
        ("inproc://x", "begins with"),
        ("tcp://127.0.0.1:6000,", "begins with"),
        ("tcp://127.0.0.1:6000-6001,tcp://127.0.0.1:6001", "one address"),
    ],
)
def test_what_cannot_be_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"published\.endpoints") as caught:
        publishers({HOST: text}, allow_tcp=False)
    assert words in str(caught.value)


def test_the_consent_is_that_of_the_other_sockets() -> None:
    flags = {"--published-endpoints": '{"a": "tcp://10.0.0.1:6000"}'}
    with pytest.raises(ConfigError, match="allow_insecure_tcp"):
        config.load(None, {}, flags)
    loaded = config.load(None, {}, flags | {"--allow-insecure-tcp": "true"})
    assert loaded.published.endpoints == {"a": "tcp://10.0.0.1:6000"}


@pytest.mark.parametrize("name", ["", "x" * 129])
def test_names_of_instances_are_those_of_the_wire(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 128"):
        publishers({name: "ipc:///run/load"}, allow_tcp=False)


def test_no_publishers_unless_asked_for() -> None:
    assert publishers(PublishedConfig().endpoints, allow_tcp=False) == []


def test_a_later_source_replaces_the_whole_table() -> None:
    env = {"DP_SIDECAR_PUBLISHED_ENDPOINTS": '{"a": "ipc:///run/a"}'}
    flags = {"--published-endpoints": '{"b": "ipc:///run/b"}'}
    assert config.load(None, env, flags).published.endpoints == {"b": "ipc:///run/b"}
