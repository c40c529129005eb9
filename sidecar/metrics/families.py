"""What every series is made with: the text that Prometheus reads, written as it is counted.

A scrape interrupts dispatch, so it writes lines and no objects: of 8 ranks it takes a quarter
of what the client library takes. The format:
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from bisect import bisect_left
from collections.abc import Sequence

PREFIX = "sglang_dp_sidecar_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Microseconds: a decision takes 5 to 60; a millisecond and more means a starved process.
BUCKETS_US = (2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 20000)
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


def label_text(names: Sequence[str], values: Sequence[str]) -> str:
    """`a="x",b="y"`, the values escaped."""
    pairs = zip(names, values, strict=True)
    return ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs])


class Family:
    """One metric with its samples.

    name: without prefix; of a counter without `_total`. kind: counter, gauge or histogram. text: a
    sentence.
    """

    def __init__(self, kind: str, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name = f"{PREFIX}{name}_total" if kind == "counter" else PREFIX + name
        self.labels = labels
        self._lines = [f"# HELP {self.name} {text}\n# TYPE {self.name} {kind}\n"]

    def add(self, values: Sequence[str], number: float) -> None:
        """A sample; values: of the labels."""
        self.put(label_text(self.labels, values), number)

    def put(self, at: str, number: float) -> None:
        """A sample; at: the text of its labels, for those who make it once for many samples."""
        self._line(self.name, at, number)

    def put_buckets(
        self, at: str, bounds_us: Sequence[int], counts: Sequence[int], total_ns: int
    ) -> None:
        """A histogram of seconds. counts: of each bucket alone, the last being what is beyond."""
        total, before = 0, at and at + ","
        bounds = [f"{us / 1e6:g}" for us in bounds_us] + ["+Inf"]
        for bound, count in zip(bounds, counts, strict=True):
            total += count
            self._line(f"{self.name}_bucket", f'{before}le="{bound}"', total)
        self._line(f"{self.name}_count", at, total)
        self._line(f"{self.name}_sum", at, total_ns / 1e9)

    def _line(self, name: str, at: str, number: float) -> None:
        # The sign makes a number of a truth value.
        self._lines.append(f"{name}{{{at}}} {+number}\n" if at else f"{name} {+number}\n")

    def exposition(self) -> bytes:
        """All lines. A label with a lone surrogate, which no message can hold, is maimed."""
        return "".join(self._lines).encode(errors="replace")


def counter(name: str, text: str, labels: Sequence[str] = ()) -> Family:
    """A counter; `name` without prefix and `_total`."""
    return Family("counter", name, text, labels)


def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Family:
    """A gauge; `name` without prefix."""
    return Family("gauge", name, text, labels)


class Timings:
    """Histogram of seconds with microsecond buckets; `observe` costs one bisection."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_US) + 1)
        self.total_ns = 0

    def observe(self, ns: int) -> None:
        """Account one duration, nanoseconds."""
        self.counts[bisect_left(BUCKETS_US, ns / 1000)] += 1
        self.total_ns += ns
