"""SGLang's own series of a rank (`sglang:num_queue_reqs` and the like), with --enable-metrics.

SGLang's collector writes them, so names and labels are the real ones; the figures are those of the
load snapshot. The older releases make the collector in another way: their ranks have no series.
"""

import time
from typing import Any

INTERVAL = 1.0
"""Seconds; SGLang writes with each prefill and each 40th decode step."""


class EngineMetrics:
    """The series of one rank; does nothing where there is no collector."""

    def __init__(self, server_args: Any) -> None:
        self._collector: Any = None
        self._next = 0.0
        if not getattr(server_args, "enable_metrics", False):
            return
        from sglang.srt.observability import metrics_collector as module

        collector: Any = getattr(module, "SchedulerMetricsCollector", None)
        if hasattr(collector, "init_new"):
            self._module = module
            self._collector = collector.init_new(
                server_args=server_args,
                enable_priority_scheduling=False,
                enable_lora=False,
                enable_hierarchical_cache=False,
            ).collector

    def write(self, load: Any) -> None:
        """Write what a load snapshot holds, if it is time."""
        now = time.monotonic()
        if self._collector is None or now < self._next:
            return
        self._next = now + INTERVAL
        count = self._module.QueueCount
        self._collector.log_stats(
            self._module.SchedulerStats(
                num_running_reqs=count(total=load.num_running_reqs),
                num_queue_reqs=count(total=load.num_waiting_reqs),
                token_usage=load.token_usage,
                full_token_usage=load.token_usage,
                num_used_tokens=load.num_used_tokens,
                kv_used_tokens=load.num_used_tokens,
                cache_hit_rate=load.cache_hit_rate,
            )
        )
