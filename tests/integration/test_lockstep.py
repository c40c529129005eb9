"""Simulated ranks of the real server take their steps together, as with DP attention."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from bench.model.steps import StepTimes, Work

from .conftest import OLD, RANKS, eventually

pytestmark = pytest.mark.skipif(OLD, reason="the old release is tested with plain DP")


def counts(live):
    """Steps of each rank, in the order of ranks."""
    info = requests.get(f"{live.server.base_url}/server_info", timeout=60).json()
    found = {state["dp_rank"]: state["steps"] for state in info["internal_states"]}
    return [found[rank] for rank in range(RANKS)]


@contextlib.contextmanager
def decoding(live, rank):
    """A rank decodes one request throughout; aborted at the end."""
    before = counts(live)[rank]["decode"]
    body = {"text": "the", "routed_dp_rank": rank, "sampling_params": {"max_new_tokens": 30_000}}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(live.generate, **body)
        try:
            eventually(lambda: counts(live)[rank]["decode"] > before)
            yield
        finally:
            abort = f"{live.server.base_url}/abort_request"
            requests.post(abort, json={"rid": "", "abort_all": True}, timeout=60)
        answer.result()


def test_prefill_on_one_rank_slows_the_decode_of_another(live):
    assert live.settle()
    times = StepTimes()
    idle = [None] * (RANKS - 2)
    together = times.seconds([Work(False, 1, 0.0, 1), Work(True, 1024, 0.0, 0), *idle])
    alone = times.seconds([Work(False, 1, 0.0, 1), None, *idle])
    with decoding(live, 0):
        before = counts(live)
        live.rank_of(live.chat("lockstep", "new " * 4000, routed_dp_rank=1))
        after = counts(live)
    steps = after[1]["prefill"] - before[1]["prefill"]
    assert steps == 4, "4,000 tokens, 1,024 a step"
    decodes = after[0]["decode"] - before[0]["decode"]
    assert decodes > steps, "rank 0 decoded in all of them"
    assert after[0]["slowest_decode"] >= together > 4 * alone
    seconds = after[0]["decode_seconds"] - before[0]["decode_seconds"]
    assert seconds >= (decodes - steps) * alone + (steps - 1) * together


def test_all_ranks_count_the_same_steps_and_idle_ones_take_part(live):
    assert live.settle()

    def quiet():
        """Counts that no longer change: nobody steps while all are idle."""
        first, second = counts(live), counts(live)
        return second if first == second else None

    found = eventually(quiet, 60)
    assert len({rank["steps"] for rank in found}) == 1
    assert len({rank["seconds"] for rank in found}) == 1
    assert all(rank["prefill"] + rank["decode"] < rank["steps"] for rank in found)


def test_the_server_stops_though_a_rank_was_killed_in_mid_step():
    """The other ranks do not wait for it, and leave nothing behind."""
    import psutil

    from bench.simulated.launch import SimulatedServer

    with SimulatedServer(dp_size=2) as server:
        server.wait_ready(240)
        tree = psutil.Process(server._process.pid).children(recursive=True)
        psutil.Process(server.pids()["schedulers"][1]).kill()
    assert psutil.wait_procs(tree, timeout=20)[1] == []
