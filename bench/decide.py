"""What does one decision of the core cost? 8, 64 and 320 ranks, prefix_affinity.

`python -m bench.decide [--json]` calls Dispatcher.handle, without wire and sockets, for requests
with distinct routing keys at steady load, and prints microseconds: minimum, median and maximum of
the repeats' means. To reach: 8 us at 8 ranks, 60 us at 320.
"""

import time

from bench import report
from sidecar import wire
from sidecar.budget import Budget
from sidecar.dispatcher import Dispatcher
from sidecar.policies import make_policy

RANKS = (8, 64, 320)
DECISIONS = 4000
REPEATS = 7
PROMPT_TOKENS = 4096


def measure(size: int) -> float:
    """Mean microseconds of a decision among `size` ranks."""
    dispatcher = Dispatcher(make_policy("prefix_affinity"), Budget(5.0, 64), boot=1)
    ranks = list(range(size))
    sent, sent_tokens = [0] * size, [0] * size
    query = wire.Query(wire.VERSION, 0, "bench", 1, ranks, sent, sent_tokens, [])
    spent = 0
    for turn in range(DECISIONS):
        rank = turn % size
        # One report a decision keeps the load steady, as a server does.
        dispatcher.report(
            wire.LoadReport(
                wire.VERSION, "bench", rank, 1, turn + 1, sent[rank], sent_tokens[rank], 4, 1
            ),
            turn * 1e-3,
        )
        query.seq = turn
        query.requests = [wire.RequestFacts(b"session-%d" % turn, 0, PROMPT_TOKENS)]
        begun = time.perf_counter_ns()
        reply = dispatcher.handle(query, turn * 1e-3)
        spent += time.perf_counter_ns() - begun
        sent[reply.ranks[0]] += 1
        sent_tokens[reply.ranks[0]] += PROMPT_TOKENS
    return spent / DECISIONS / 1000


def main() -> None:
    options = report.arguments(__doc__).parse_args()
    costs = {size: report.spread([measure(size) for _ in range(REPEATS)]) for size in RANKS}
    rows = [["ranks", "min us", "median us", "max us"]]
    rows += [[str(n), *(f"{c[k]:.2f}" for k in ("min", "median", "max"))] for n, c in costs.items()]
    result = {
        "us_per_decision": {str(size): cost["median"] for size, cost in costs.items()},
        "spread": {str(size): cost for size, cost in costs.items()},
    }
    report.show(result, rows, as_json=options.json)


if __name__ == "__main__":
    main()
