"""Does the model find faults? Each of these breaks the product in one place.

    python -m tests.model.mutations [WORDS]

runs the model with each of them (or those whose names contain WORDS) until it fails, and says which
assertion caught it, in how many seconds.
"""

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from sglang_hook.client import SidecarClient
from sglang_hook.controller import Chooser
from sglang_hook.memory import History, LastRanks, SentCounters
from sglang_hook.reporter import Reporter
from sidecar import wire
from sidecar.budget import Instance
from sidecar.dispatcher import Dispatcher
from sidecar.errors import PeerError
from sidecar.loads import LoadView, RankState
from sidecar.policies import kv_affinity, least_loaded
from sidecar.policies.kv_affinity import KvAffinity
from sidecar.seat import Seat
from sidecar.tally import Tally
from tests.model.draws import POLICIES
from tests.model.machine import Model

EXAMPLES = 400


def in_flight_below_zero(state: RankState) -> tuple[int, int]:
    received = state.report.received if state.report else 0
    return state.sent - state.sent_origin - received, max(0, state.sent_tokens)


def keep_what_was_assigned(instance: Instance, query: wire.Query) -> None:
    instance._sent = [max(pair) for pair in zip(instance._sent, query.sent, strict=True)]
    instance._sent_tokens = list(query.sent_tokens)
    for position in range(len(instance._sent)):
        instance._place(position)


def count_twice(counters: SentCounters, rank: int, tokens: int) -> None:
    REAL["count"](counters, rank, tokens)
    if tokens == 1:
        REAL["count"](counters, rank, tokens)


def query_of_one_number(chooser: Chooser, *args: Any, **kwargs: Any) -> bytes:
    chooser._seq = min(chooser._seq, 5)
    query: bytes = REAL["query"](chooser, *args, **kwargs)
    return query


def any_rank(chooser: Chooser, facts: Any, live: Any) -> list[int | None]:
    answer = chooser.ask(chooser._query(facts, live), chooser._seq) if facts else "nothing"
    if isinstance(answer, str):
        chooser.bypass(answer, len(facts))
        return [None] * len(facts)
    return list(answer.ranks) + [None] * (len(facts) - len(answer.ranks))


def same_ranks_as_before(instance: Instance, ranks: list[int], now: float) -> None:
    if len(ranks) != len(instance.view.ranks):
        REAL["ranks"](instance, ranks, now)


def always_fresh(instance: Instance, now: float) -> None:
    REAL["refresh"](instance, now)
    instance.view.usable = [True] * len(instance.view.ranks)


def any_report(instance: Instance, report: wire.LoadReport, now: float) -> None:
    try:
        REAL["report"](instance, report, now)
    except PeerError:
        state = instance.states[report.rank]
        state.report = report
        instance.refresh(now)


def any_answer(client: SidecarClient, data: bytes, seq: int) -> Any:
    try:
        answer = wire.decode_answer(data)
    except PeerError:
        return "malformed"
    return answer if isinstance(answer, wire.Reply) else "refused"


def forget_local(chooser: Chooser, known: Any, rank: int, now: float, *, decided: bool) -> None:
    if decided:
        REAL["note"](chooser, known, rank, now, decided=decided)


def homeless(policy: KvAffinity, facts: wire.RequestFacts, *args: Any) -> Any:
    return REAL["home"](policy, wire.RequestFacts(b"", 0, facts.tokens, None, []), *args)


TURNS = iter(range(1 << 60))


def by_chance(view: LoadView, tied: list[int]) -> int:
    return tied[next(TURNS) % len(tied)]


def all_told(chooser: Chooser, reply: wire.Reply) -> None:
    REAL["heard"](chooser, reply)
    chooser._told = chooser._news


def report_of_one_number(reporter: Reporter, *args: Any) -> bool:
    reporter._seq = min(reporter._seq, 2)
    taken: bool = REAL["push"](reporter, *args)
    return taken


def uncounted(chooser: Chooser, cause: str, requests: int = 1) -> None:
    REAL["bypass"](chooser, cause, min(requests, 1))


def unheard(tally: Tally, query: wire.Query) -> None:
    query.bypassed = None
    REAL["hear"](tally, query)


def drop_last(dispatcher: Dispatcher, query: wire.Query, now: float) -> wire.Reply:
    reply: wire.Reply = REAL["handle"](dispatcher, query, now)
    if len(reply.ranks) > 2:
        reply.ranks.pop()
    return reply


def first_come(lasts: LastRanks, affinity: int, rank: int, now: float) -> None:
    lasts._table.setdefault(affinity, (rank, now))


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


REAL: dict[str, Callable[..., Any]] = {
    "count": SentCounters.count,
    "query": Chooser._query,
    "ranks": Instance._set_ranks,
    "refresh": Instance.refresh,
    "report": Instance.apply_report,
    "note": Chooser._note,
    "home": KvAffinity._home,
    "heard": Chooser.heard,
    "push": Reporter.push,
    "bypass": Chooser.bypass,
    "hear": Tally.hear,
    "handle": Dispatcher.handle,
}
MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "in flight without max(0, ...)": (RankState, "in_flight", in_flight_below_zero),
    "no reconcile": (RankState, "reconcile", nothing),
    "a retracted assignment stays counted": (Instance, "_set_sent", keep_what_was_assigned),
    "an assignment is not counted": (Instance, "assign", nothing),
    "a health check is counted as two sent": (SentCounters, "count", count_twice),
    "a number of a query is used again": (Chooser, "_query", query_of_one_number),
    "the hook takes any rank": (Chooser, "_remote", any_rank),
    "the sidecar keeps ranks that left": (Instance, "_set_ranks", same_ranks_as_before),
    "staleness is forgotten": (Instance, "refresh", always_fresh),
    "old reports are taken": (Instance, "apply_report", any_report),
    "an answer to another query is taken": (SidecarClient, "_read", any_answer),
    "a local decision is not remembered": (Chooser, "_note", forget_local),
    "the first rank of a key is remembered, not the last": (LastRanks, "put", first_come),
    "kv_affinity does not know keys": (KvAffinity, "_home", homeless),
    "ties are broken by what is no input": (kv_affinity, "next_of", by_chance),
    "ties of least_loaded too": (least_loaded, "next_of", by_chance),
    "a new sidecar is not told what was": (Chooser, "heard", all_told),
    "the past is never marked as told": (History, "_mark", nothing),
    "a batch is counted as one bypass": (Chooser, "bypass", uncounted),
    "the sidecar does not hear of bypasses": (Tally, "hear", unheard),
    "an older controller is heard": (Instance, "_check_controller", nothing),
    "an answer lacks a request": (Dispatcher, "handle", drop_last),
    "reports of one number": (Reporter, "push", report_of_one_number),
    "the policy does not learn": (Seat, "take", lambda seat, facts, at: None),
}


def caught(mutation: tuple[Any, str, Callable[..., Any]]) -> str:
    """Which policy's model fails with it, after how long, and where."""
    begun = time.monotonic()
    for policy in POLICIES:
        machine = type(f"Model of {policy}", (Model,), {"policy": policy})
        profile = settings(
            max_examples=EXAMPLES // len(POLICIES),
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        try:
            with mock.patch.object(*mutation):
                run_state_machine_as_test(machine, settings=profile)
        except Exception as error:  # noqa: BLE001 - whatever it is, it was found
            spent = time.monotonic() - begun
            return f"{policy}, {spent:.0f} s: {type(error).__name__} {place(error)}"
    return f"NOT CAUGHT in {EXAMPLES} examples, {time.monotonic() - begun:.0f} s"


def place(error: BaseException) -> str:
    """The line of the model that raised it, or else the last one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "tests/model" in frame.filename]
    last = frames[-1] if frames[-1] in ours or not ours else ours[-1]
    return f"{last.filename.rpartition('/')[2]}: {last.line}"


def main() -> int:
    word = " ".join(sys.argv[1:])
    missed = 0
    for name, mutation in MUTATIONS.items():
        if word in name:
            found = caught(mutation)
            missed += found.startswith("NOT")
            print(f"{name}: {found}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
