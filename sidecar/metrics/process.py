"""Series of the process itself: its settings, its speed, what it refused."""

import time
from collections import Counter, deque
from collections.abc import Iterator

from sidecar import __version__
from sidecar.ceiling import CAUSES as RESET_CAUSES
from sidecar.dispatcher import Dispatcher
from sidecar.metrics.families import BUCKETS_US, Family, Timings, counter, gauge
from sidecar.orders import Change

# What `orders.Change.what` says, told as zero before it happens: a rate needs a beginning.
CHANGES = frozenset({"start", "set", "reload", "canary", "canary_off", "shadow", "shadow_off"})


MAX_HISTORY = 100

# Why a decision is not in the decision log; `journal.writer` says which.
LOG_CAUSES = ("disk", "lagging", "locked", "slow", "too_large")


class Health:
    """What the process itself counts."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.query_time = Timings()
        self.rejected: Counter[tuple[str, str]] = Counter()
        """(socket, cause) -> messages."""
        self.handshake_failures: Counter[tuple[str, str]] = Counter()
        """(socket, cause of `gate.CAUSES`) -> connections over TCP."""
        self.reports = 0
        self.load_source = "hook"
        """`published`: SGLang's publishers are read too."""
        self.published: Counter[tuple[str, str]] = Counter()
        """(instance, one of `published.reports.OUTCOMES`) -> messages."""
        self.resets: Counter[str] = Counter()
        """Cause (of `ceiling.CAUSES`) -> how often the sockets were made anew."""
        self.policy_errors = 0
        self.changes: deque[Change] = deque(maxlen=MAX_HISTORY)
        """Of policies, the newest last."""
        self.policy_changes: Counter[str] = Counter()
        """What changed (`orders.Change.what`) -> how often."""
        self.unobserved = 0
        """Requests that shadow, decision log and paths did not see, as too much waited."""
        self.log_records = self.log_bytes = 0
        """Decisions in the decision log, and bytes of its files, written by this process."""
        self.log_dropped: Counter[str] = Counter()
        """Cause (`LOG_CAUSES`) -> decisions that are not in it."""
        self.remade_sockets = 0
        """Socket files made again."""
        self.reload_failures = 0
        self.last_reload_ok = True


def process_families(dispatcher: Dispatcher, health: Health) -> Iterator[Family]:
    """Families without an instance."""
    build = gauge("build_info", "This sidecar; the value is always 1.", ("version",))
    build.add([__version__], 1)
    yield build
    version = gauge("policy_version", "Policies that this process has run, the first being 1.")
    version.put("", dispatcher.policy_version)
    yield version
    times = Family(
        "histogram", "query_seconds", "Time to decode, decide and encode one query (maybe a batch)."
    )
    times.put_buckets("", BUCKETS_US, health.query_time.counts, health.query_time.total_ns)
    yield times
    yield from _refused(health)
    yield from _counted(health)
    ok = gauge("last_reload_successful", "1 unless the last reload was refused.")
    ok.put("", health.last_reload_ok)
    yield ok


def _refused(health: Health) -> Iterator[Family]:
    rejected = counter("rejected_messages", "Messages refused.", ("socket", "cause"))
    for (socket, cause), count in health.rejected.items():
        rejected.add([socket, cause], count)
    yield rejected
    handshakes = counter(
        "handshake_failures", "Connections over TCP that were not let in.", ("socket", "cause")
    )
    for (socket, cause), count in health.handshake_failures.items():
        handshakes.add([socket, cause], count)
    yield handshakes


def _counted(health: Health) -> Iterator[Family]:
    resets = counter(
        "socket_resets", "How often all sockets were made anew, as too much had come.", ("cause",)
    )
    for cause in RESET_CAUSES:
        resets.add([cause], health.resets[cause])
    yield resets
    changes = counter("policy_changes", "Changes of the policies at work.", ("what",))
    for what in sorted(CHANGES | set(health.policy_changes)):
        changes.add([what], health.policy_changes[what])
    yield changes
    dropped = counter("decision_log_dropped", "Decisions left out of the decision log.", ("cause",))
    for cause in LOG_CAUSES:
        dropped.add([cause], health.log_dropped[cause])
    yield dropped
    for name, text, value in (
        ("load_reports", "Load reports taken in.", health.reports),
        (
            "policy_errors",
            "Requests whose policy failed; the default policy decided them.",
            health.policy_errors,
        ),
        (
            "reload_failures",
            "Reloads refused; the settings before stayed in force.",
            health.reload_failures,
        ),
        (
            "sockets_remade",
            "Socket files that somebody removed, and that were made again.",
            health.remade_sockets,
        ),
        ("decision_log_records", "Decisions in the decision log.", health.log_records),
        ("decision_log_bytes", "Bytes written to the decision log.", health.log_bytes),
        (
            "unobserved_requests",
            "Requests that shadow, decision log and paths left out, as too much waited.",
            health.unobserved,
        ),
    ):
        family = counter(name, text)
        family.put("", value)
        yield family
