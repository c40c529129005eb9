"""Where a rank stands and the load it reports, across SGLang versions."""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.simulated.compat import create_load_snapshot_writer, make_loads

if TYPE_CHECKING:
    from bench.simulated.scheduler import SimulatedScheduler


class Placement(NamedTuple):
    dp_rank: int
    dp_ranks: int
    is_rank_zero: bool


def find_placement(server_args: Any, ranks: Sequence[int | None]) -> Placement:
    """`ranks` are what `run_scheduler_process` passes beyond the two argument records.

    There are none from 0.5.21 on, where the process's runtime context knows its place.
    """
    if not ranks:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        first = parallel.pp_rank == parallel.attn_tp_rank == parallel.attn_cp_rank == 0
        # Attention DP has a width of its own from 0.5.22 on.
        dp_ranks = getattr(parallel, "num_dp_ranks", None) or server_args.dp_size
        return Placement(parallel.dp_rank or 0, dp_ranks, first)
    from sglang.srt.layers.dp_attention import compute_dp_attention_world_info

    _, tp_rank, _, pp_rank, attn_cp_rank, _, dp_rank = ranks
    attn_tp_rank = compute_dp_attention_world_info(
        server_args.enable_dp_attention,
        tp_rank,
        server_args.tp_size,
        server_args.dp_size,
        server_args.attn_cp_size,
    )[0]
    first = pp_rank == attn_tp_rank == attn_cp_rank == 0
    return Placement(dp_rank or 0, server_args.dp_size, first)


def open_writer(server_args: Any, port_args: Any, place: Placement) -> Any:
    if not place.is_rank_zero or create_load_snapshot_writer is None:
        return None
    takes_server_args = "server_args" in inspect.signature(create_load_snapshot_writer).parameters
    arguments = (server_args, port_args) if takes_server_args else (port_args,)
    return create_load_snapshot_writer(
        *arguments,
        place.dp_ranks,
        place.dp_rank,
        publish_interval=server_args.load_snapshot_publish_interval,
    )


class LoadInquirer:
    """Counts what SGLang's inquirer counts, with its gap: a prefill not yet merged is in none."""

    def __init__(self, scheduler: "SimulatedScheduler") -> None:
        self._scheduler = scheduler

    def get_loads(self) -> Any:
        scheduler = self._scheduler
        rank, settings, batch = scheduler.rank, scheduler.settings, scheduler.last_batch
        # A snapshot is taken before the results of a step are processed, and a decode step has
        # memory for its new tokens from its start on.
        decoded = batch is not None and not batch.forward_mode.is_extend()
        load = rank.load(int(decoded))
        used = load.tokens - rank.waiting_tokens
        return make_loads(
            dp_rank=scheduler.placement.dp_rank,
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_waiting_uncached_tokens=load.waiting_uncached,
            num_used_tokens=used,
            num_total_tokens=load.tokens,
            max_total_num_tokens=settings.cache_tokens,
            max_running_requests=settings.max_running_requests,
            token_usage=round(used / settings.cache_tokens, 4),
            cache_hit_rate=round(rank.cached_tokens / max(1, rank.prompt_tokens), 4),
        )
