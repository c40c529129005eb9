"""What a step costs: tables of measured step times, and how an uneven step is read from them.

The tables (calibration.json) are of even steps: every rank does the same. An uneven step is looked
up at `(1 - shared) * max + shared * mean` of the ranks' tokens: attention and what else runs on the
rank's own GPU waits for the slowest rank, while experts are spread over all GPUs and cost what the
sum of tokens costs. An even step is exact by construction; `shared` is an assumption, as are the
costs of context that the tables do not vary. docs/results.md shows what a factor of two changes.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

CALIBRATION = Path(__file__).with_name("calibration.json")

FOREVER = 1 << 60
"""Steps."""

Scale = Annotated[float, Meta(ge=0.01, le=100.0)]


class Work(NamedTuple):
    """What one rank does in a step."""

    prefill: bool
    tokens: int
    """New tokens: those prefilled, or one for each request that decodes."""
    pairs: float
    """Prefill: (new token, token before it) pairs that attention covers."""
    context: int
    """Decode: tokens that attention reads, summed over the batch."""


class StepParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scales of the step times, and what the tables leave open."""

    table: str = "Qwen3.5-122B-A10B-FP8@h100"
    """Which table: MODEL@GPU, see calibration.json."""
    shared: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.6
    """Share of a token's cost that all GPUs bear together (experts). An assumption: of the model's
    10B active parameters somewhat over half are in experts; not measured."""
    prefill_scale: Scale = 1.0
    decode_scale: Scale = 1.0
    context_ns: Annotated[float, Meta(ge=0.0, le=1e6)] = 12.0
    """Decode: nanoseconds to read one cached token. 12 full-attention layers x 2 KV heads x 256 x K
    and V x 2 bytes = 24 KB at 2 TB/s; by arithmetic on the architecture, not measured."""
    overhead_ms: Annotated[float, Meta(ge=0.0, le=1e4)] = 0.0
    """Added to every step: scheduling that is not hidden behind the GPU."""


class StepTimes:
    """Durations of steps. Raises ValueError for an unknown table."""

    def __init__(self, params: StepParams = StepParams()) -> None:  # noqa: B008 - frozen
        self.params = params
        data = json.loads(CALIBRATION.read_text(encoding="utf-8"))
        table = data["tables"].get(params.table)
        if table is None:
            raise ValueError(f"table: no {params.table!r}; there are {', '.join(data['tables'])}")
        prefill, self._pair = _fit_pairs(table)
        decode = [
            (size, max(0.0, ms / 1e3 - size * data["context_tokens"] * params.context_ns / 1e9))
            for size, ms in table["decode_ms"]
        ]
        self._prefill, self._decode = _Line(prefill), _Line(decode)

    def seconds(self, works: Sequence[Work | None]) -> float:
        """Duration of one step of ranks that step together; None: a rank with nothing to do."""
        always, prefill, decode = self._parts(works)
        # A small prefill beside a large decode batch is not faster than that batch alone.
        return always + max(prefill, decode)

    def _parts(self, works: Sequence[Work | None]) -> tuple[float, float, float]:
        """Seconds that are always added, of the step as a prefill (0: none), of its decode."""
        params = self.params
        most = total = decoding = decoding_total = context = 0
        pairs, prefills = 0.0, False
        for work in works:
            if work is None:
                continue
            tokens = work.tokens
            total += tokens
            most = max(most, tokens)
            if work.prefill:
                prefills = True
                pairs = max(pairs, work.pairs)
            else:
                decoding_total += tokens
                decoding = max(decoding, tokens)
                context = max(context, work.context)
        always = params.overhead_ms / 1e3 + context * params.context_ns / 1e9 * params.decode_scale
        prefill = decode = 0.0
        if decoding:
            even = self._even(decoding, decoding_total, len(works))
            decode = self._decode.at(even) * params.decode_scale
        if prefills:
            even = self._even(most, total, len(works))
            prefill = (self._prefill.at(even) + pairs * self._pair) * params.prefill_scale
        return always, prefill, decode

    def _even(self, most: int, total: int, ranks: int) -> float:
        """Tokens a rank of the even step that costs as much."""
        shared = self.params.shared
        return (1 - shared) * most + shared * total / ranks

    def growth(self, works: Sequence[Work | None]) -> tuple[float, int]:
        """How much longer each further step like this one takes, in seconds, and for how many
        steps that is so: decoding requests grow by a token, prompts in chunks by a chunk, and the
        rank whose context is longest may be passed by one that grows faster."""
        chunk, decoding = 0, []
        for work in works:
            if work is not None:
                if work.prefill:
                    chunk = max(chunk, work.tokens)
                else:
                    decoding.append((work.context, work.tokens))
        longest, grows = max(decoding, default=(0, 0))
        steps = FOREVER
        for context, tokens in decoding:
            if tokens > grows:
                steps = min(steps, 1 + (longest - context) // (tokens - grows))
        params = self.params
        seconds = grows * params.context_ns / 1e9 * params.decode_scale
        if chunk:
            _, prefill, decode = self._parts(works)
            # Where decode takes longer, the growing prefill may pass it with any step.
            steps = steps if prefill >= decode else 1
        return seconds + chunk * chunk * self._pair * params.prefill_scale, steps


def _fit_pairs(table: dict[str, Any]) -> tuple[list[tuple[float, float]], float]:
    """Points (new tokens, seconds without attention pairs) and seconds a pair.

    A prompt of n tokens has n * n / 2 pairs. Cost is linear in n but for those, so the difference
    quotients of the two longest intervals tell them apart; without enough points, no pair costs.
    """
    points = [(float(n), ms / 1e3) for n, ms in table["prefill_ms"]]
    pair = 0.0
    if len(points) >= 5:
        (n0, t0), (n1, t1), (n2, t2) = points[-3:]
        bend = ((t2 - t1) / (n2 - n1) - (t1 - t0) / (n1 - n0)) / (n2 - n0)
        pair = max(0.0, 2 * bend)
    line = [(n, t - n * n / 2 * pair) for n, t in points]
    for cached, new, ms in table["cached_prefill_ms"]:
        if new < points[0][0]:
            line.insert(0, (float(new), ms / 1e3 - (new * cached + new * new / 2) * pair))
    return line, pair


class _Line:
    """Linear between points, constant below the first, goes on like the last interval above."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._x = [x for x, _ in points]
        self._y = [y for _, y in points]
        self._slope = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)]

    def at(self, x: float) -> float:
        place = bisect_right(self._x, x) - 1
        if place < 0:
            return self._y[0]
        place = min(place, len(self._slope) - 1)
        return self._y[place] + (x - self._x[place]) * self._slope[place]
