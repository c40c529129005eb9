"""TCP between hook and sidecar, with the right keys, wrong ones and none. Case 32."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_hook.reporter import Sample
from sidecar.wire import report_endpoint
from tests.processes import Sidecar, free_port, short_directory, sidecar_process, wait_for
from tests.tcp import client_keys, failures, flags, hooked, reporting, tcp, two_deployments

UNAVAILABLE = 69


@pytest.fixture(scope="module")
def keys() -> Iterator[Path]:
    with two_deployments() as path:
        yield path


def refused(*given: str) -> str:
    """The log of a sidecar that does not start."""
    process = Sidecar(*given)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(process.end)
        assert process.wait() in (2, UNAVAILABLE), process.log()
        return process.log()


def test_both_sockets_with_the_right_keys(keys: Path) -> None:
    endpoint, ours = tcp(), client_keys(keys)
    with sidecar_process(endpoint, *flags(keys)) as sidecar:
        with hooked(endpoint, ours) as hook, reporting(report_endpoint(endpoint), ours) as rank:
            hook.meet()
            wait_for(lambda: rank.push(1, Sample(running=7)))
            hook.meet()
            wait_for(lambda: sidecar.metric("running_requests", dp_rank="3") == 7)
        assert not failures(sidecar)
        assert sidecar.stop() == 0


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this kernel has no IPv6")
def test_ipv6(keys: Path) -> None:
    endpoint = tcp().replace("127.0.0.1", "[::1]")
    with sidecar_process(endpoint, *flags(keys)), hooked(endpoint, client_keys(keys)) as hook:
        hook.meet()


def test_queries_on_ipc_and_reports_of_other_nodes_on_tcp(keys: Path) -> None:
    with short_directory() as directory:
        endpoint, reports = f"ipc://{directory}/q", f"tcp://127.0.0.1:{free_port()}"
        with sidecar_process(endpoint, f"--reports-tcp={reports}", *flags(keys)) as sidecar:
            far = reporting(reports, client_keys(keys), rank=2)
            near = reporting(report_endpoint(endpoint), None, rank=1)
            # Keys are for tcp:// only: on the leader the hook has both.
            with hooked(endpoint, client_keys(keys)) as hook, far as two, near as one:
                hook.meet()
                wait_for(lambda: two.push(1, Sample(running=22)))
                wait_for(lambda: one.push(1, Sample(running=11)))
                wait_for(lambda: sidecar.metric("running_requests", dp_rank="2") == 22)
                wait_for(lambda: sidecar.metric("running_requests", dp_rank="1") == 11)
                with reporting(reports, None, rank=0) as stranger:
                    unheard = lambda: not stranger.push(1, Sample(running=1))  # noqa: E731
                    kept_out = {"socket": "report", "cause": "protocol"}
                    wait_for(lambda: unheard() and failures(sidecar, **kept_out), 60)
                assert sidecar.metric("running_requests", dp_rank="0") is None


def test_case_32_a_wrong_key_of_the_sidecar(keys: Path) -> None:
    """Decided locally, with a cause of its own; and told when there is somebody to tell."""
    endpoint = tcp()
    with hooked(endpoint, client_keys(keys, server="ours")) as hook:
        with sidecar_process(endpoint, *flags(keys, "others")) as sidecar:
            hook.is_kept_out()
            at_least = {"socket": "query", "cause": "protocol"}
            wait_for(lambda: failures(sidecar, **at_least) > 1)
            assert not sidecar.metric("queries_total")
            assert len(sidecar.lines("query: a handshake failed")) == 1
            secrets = [path.read_text().strip() for path in keys.glob("*/*_secret")]
            assert not [secret for secret in secrets if secret in sidecar.log()]
        with sidecar_process(endpoint, *flags(keys, "ours")) as sidecar:
            hook.meet()
            hook.meet()
            wait_for(lambda: sidecar.metric("bypassed_total", cause="handshake"))


def test_an_unknown_key_of_the_hook(keys: Path) -> None:
    endpoint = tcp()
    with sidecar_process(endpoint, *flags(keys)) as sidecar:
        with hooked(endpoint, client_keys(keys, own="others")) as hook:
            hook.is_kept_out()
        wait_for(lambda: failures(sidecar, socket="query", cause="client_key"))
        wait_for(lambda: sidecar.lines("127.0.0.1", "serve.curve_client_keys_file"))
        with hooked(endpoint, client_keys(keys)) as hook:
            hook.meet()


@pytest.mark.parametrize("hook_has", [False, True])
def test_only_one_end_has_keys(keys: Path, hook_has: bool) -> None:
    endpoint = tcp()
    own = ["--allow-insecure-tcp=true"] if hook_has else flags(keys)
    with sidecar_process(endpoint, *own) as sidecar:
        with hooked(endpoint, client_keys(keys) if hook_has else None) as hook:
            hook.is_kept_out()
        wait_for(lambda: failures(sidecar, socket="query"))


def test_plain_tcp_with_consent(keys: Path) -> None:
    endpoint = tcp()
    with sidecar_process(endpoint, "--allow-insecure-tcp=true"), hooked(endpoint, None) as hook:
        hook.meet()


def test_nobody_there_is_no_handshake(keys: Path) -> None:
    with hooked(tcp(), client_keys(keys)) as hook:
        assert {hook.send() for _ in range(20)} == {"unreachable"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--reports-tcp=tcp://127.0.0.1:19999"], ["tcp://127.0.0.1:19999", "allow_insecure_tcp"]),
        (["--reports-tcp=tcp://127.0.0.1:99999", "{secret}", "{clients}"], ["1 to 65535"]),
        (["--reports-tcp=ipc:///tmp/x", "{secret}", "{clients}"], ["serve.reports_tcp", "tcp://"]),
        (["--reports-tcp=9478", "{secret}", "{clients}"], ["9478", "tcp://"]),
        (["{secret}"], ["serve.curve_client_keys_file", "needed"]),
        (["{clients}"], ["serve.curve_secret_key_file", "needed"]),
        (["--curve-secret-key-file=/no", "{clients}"], ["serve.curve_secret_key_file", "/no"]),
    ],
)
def test_settings_that_cannot_be(keys: Path, given: list[str], words: list[str]) -> None:
    secret, clients = flags(keys)
    with short_directory() as directory:
        arguments = [part.format(secret=secret, clients=clients) for part in given]
        log = refused(f"ipc://{directory}/q", *arguments)
    assert not [word for word in words if word not in log], log
    assert "Traceback" not in log
