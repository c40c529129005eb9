"""One arm on one workload with one seed, in virtual time."""

import msgspec

from bench.arms.base import Arm
from bench.model.cluster import Cluster
from bench.model.server import ServerSpec
from bench.outcome import Outcome
from bench.workloads.base import Workload

SPILLS = frozenset(("spill", "token_spill", "prefix_spill", "stale_skip", "token_stale_skip"))


def simulate(workload: Workload, arm: Arm, seed: int, server: ServerSpec) -> Outcome:
    """Run it; equal arguments give equal outcomes, in every process."""
    rank = msgspec.structs.replace(server.rank, page_tokens=workload.page_tokens)
    server = msgspec.structs.replace(server, rank=rank)
    cluster = Cluster(server, shared_cache=arm.shared_cache)
    end = cluster.run(workload.make(seed), arm.make(cluster))
    rows = cluster.rows
    begun = min((row.at for row in rows), default=0.0)
    return Outcome(
        workload=workload.name,
        arm=arm.name,
        seed=seed,
        kind="virtual",
        ranks=server.ranks,
        rows=rows,
        seconds=end - begun,
        samples=cluster.samples,
        idle_share=cluster.idle_share,
        # Arms that prefer no rank spill nothing.
        spills=sum(row.reason in SPILLS for row in rows),
        fallbacks=sum(row.reason == "fallback" for row in rows),
        bypasses=0,
    )
