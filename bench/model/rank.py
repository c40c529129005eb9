"""The scheduler of one rank: waiting queue, chunked prefill, decode, and its prefix cache.

It is SGLang's normal event loop without a model: first come, first served; a prefill step before
any decode step; at most one prompt in chunks; a prompt enters the cache as far as it is computed
and an answer when it ends. Simplification: memory for the whole answer is reserved on admission, so
nothing is ever retracted (SGLang reserves a share that it learns, and retracts when it was wrong).
"""

import heapq
from collections import deque
from collections.abc import Hashable

from bench.model.radix import RadixCache
from bench.model.request import Load, RankSpec, Request
from bench.model.steps import Work


class Rank:
    """One rank. A driver calls `add`, then for each step `plan`, and `finish` when it is over."""

    def __init__(self, spec: RankSpec, cache: RadixCache | None = None) -> None:
        self.spec = spec
        self.cache = cache or RadixCache(spec.cache_tokens // spec.page_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[tuple[int, int, Request]] = []
        """Decoding requests as a heap: (clock at their end, a count, request)."""
        self.fresh: list[Request] = []
        """The batch prefilled last, which joins `running` with the next plan, as in SGLang."""
        self.chunked: Request | None = None
        """The prompt of which only a part fits in a step."""
        self.clock = 0
        """Decode steps so far."""
        self.context = 0
        """Tokens of the decoding requests."""
        self.waiting_tokens = 0
        """Prompt tokens waiting."""
        self.waiting_uncached = 0
        """Of those, tokens that the cache lacked when their request came."""
        self.prompt_tokens = self.cached_tokens = 0
        """Of all requests admitted so far."""
        self._joined = 0
        self._planned = 0
        self.batch: list[Request] = []
        """The prefill under way."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if the rank could never hold it."""
        if request.prompt_tokens + request.output_tokens > self.spec.whole_pages:
            raise ValueError(
                f"{request.prompt_tokens} + {request.output_tokens} tokens exceed the rank's "
                f"{self.spec.whole_pages}"
            )
        request.estimate = self.uncached_of(request.pages, request.prompt_tokens)
        self.waiting.append(request)
        self.waiting_tokens += request.prompt_tokens
        self.waiting_uncached += request.estimate

    def abort(self, request: Request) -> None:
        """End a request of this rank between two steps; what is computed of it stays cached."""
        if request in self.waiting:
            self.waiting.remove(request)
            self.cache.claimed = None
            self.waiting_tokens -= request.prompt_tokens
            self.waiting_uncached -= request.estimate
            return
        computed = request.done
        if request in self.fresh:
            self.fresh.remove(request)
        elif request is self.chunked or request in self.batch:
            self.chunked = None if request is self.chunked else self.chunked
            self.batch = [each for each in self.batch if each is not request]
        else:
            self.running = [entry for entry in self.running if entry[2] is not request]
            heapq.heapify(self.running)
            total = request.prompt_tokens + request.output_tokens - (request.ends - self.clock)
            self.context -= total
            computed = total - 1
        self._release(request, computed)

    def flush(self) -> bool:
        """Empty the cache, as if no prompt had ever come; False while there are requests."""
        if self.requests:
            return False
        self.cache.clear()
        self.prompt_tokens = self.cached_tokens = 0
        return True

    def uncached_of(self, pages: tuple[Hashable, ...], prompt_tokens: int) -> int:
        """Prompt tokens that the cache lacks at this moment, at least 1."""
        page = self.spec.page_tokens
        return prompt_tokens - self.cache.peek(pages[: (prompt_tokens - 1) // page]) * page

    @property
    def active(self) -> int:
        """Requests that run: in decode, prefilled last, in prefill, or in chunks."""
        count = len(self.running) + len(self.fresh) + len(self.batch)
        return count + (self.chunked is not None and self.chunked not in self.batch)

    @property
    def requests(self) -> int:
        """Running and waiting requests."""
        return self.active + len(self.waiting)

    @property
    def to_prefill(self) -> int:
        """Prompt tokens to prefill: what the cache lacked of those waiting, and a chunked rest."""
        return self.waiting_uncached + (0 if self.chunked is None else self.chunked.uncached)

    def load(self, decoded: int = 0) -> Load:
        """The load as SGLang's snapshot has it; a prefill not yet merged is in no count.

        decoded: decode steps not accounted yet.
        """
        page = self.spec.page_tokens
        held = sum(request.done - request.stored for request in self.batch)
        held += self.context + decoded * len(self.running)
        held -= sum(entry[2].stored for entry in self.running)
        used = self.cache.pinned * page + held
        rate = self.cached_tokens / max(1, self.prompt_tokens)
        uncached = int(self.waiting_tokens * (1 - rate))
        if self.chunked is not None:
            uncached += self.chunked.uncached
        total = used + self.waiting_tokens
        return Load(len(self.running), len(self.waiting), total, uncached)

    # Steps

    def plan(self) -> Work | None:
        """The next step's work; None if there is nothing to do."""
        for request in self.fresh:
            self._join(request)
        self.fresh = []
        pairs = self._plan_prefill()
        if self.batch:
            tokens = self._planned
            return Work(True, tokens, pairs, 0)
        if self.running:
            return Work(False, len(self.running), 0.0, self.context)
        return None

    def finish(self, prefill: bool, steps: int = 1) -> tuple[list[Request], list[Request]]:
        """Account `steps` steps like the planned one, at most `alike`.

        Returns the requests that got their first token and those that ended, in the order of
        arrival and of their ends.
        """
        if not prefill:
            return [], self._decode(steps)
        for _ in range(steps - 1):
            # A node of the cache a chunk, as SGLang makes them: leaves are evicted whole.
            (request,) = self.batch
            self._store(request, request.done)
            request.done += self.spec.chunk_tokens
        firsts, ended = [], []
        batch, self.batch = self.batch, []
        for request in batch:
            self._store(request, request.done)
            if request is self.chunked:
                continue
            firsts.append(request)
            if request.output_tokens <= 1:
                self._release(request)
                ended.append(request)
            else:
                self.fresh.append(request)
        return firsts, ended

    def alike(self, prefill: bool) -> int:
        """How many steps like the planned one are ahead: until a decoding request ends, or the last
        part of a prompt in chunks, beside which others may find room."""
        if not prefill:
            return self.running[0][0] - self.clock
        if self.chunked is None or self._planned < self.spec.chunk_tokens or len(self.batch) > 1:
            return 1
        return -(-self.chunked.uncached // self.spec.chunk_tokens)

    def _decode(self, steps: int) -> list[Request]:
        self.clock += steps
        self.context += steps * len(self.running)
        ended = []
        running = self.running
        while running and running[0][0] <= self.clock:
            request = heapq.heappop(running)[2]
            self.context -= request.prompt_tokens + request.output_tokens
            self._release(request)
            ended.append(request)
        return ended

    def _join(self, request: Request) -> None:
        request.ends = self.clock + request.output_tokens - 1
        self._joined += 1
        heapq.heappush(self.running, (request.ends, self._joined, request))
        self.context += request.prompt_tokens + 1

    def _plan_prefill(self) -> float:
        """Fill `batch` and `_planned`; returns the attention pairs."""
        self._planned = 0
        pairs = 0.0
        chunked, self.chunked = self.chunked, None
        if chunked is not None:
            pairs += self._take(chunked)
        room = self.spec.max_running - len(self.running)
        while self.waiting and self.chunked is None and len(self.batch) < room:
            if self._planned >= self.spec.chunk_tokens or not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.waiting_tokens -= request.prompt_tokens
            self.waiting_uncached -= request.estimate
            pairs += self._take(request)
        return pairs

    def _take(self, request: Request) -> float:
        """Put as much of a prompt as fits into the step."""
        tokens = min(request.uncached, self.spec.chunk_tokens - self._planned)
        pairs = tokens * (request.done + tokens / 2)
        request.done += tokens
        self._planned += tokens
        self.batch.append(request)
        if request.uncached:
            self.chunked = request
        return pairs

    def _admit(self, request: Request) -> bool:
        """Match the cache and reserve memory; False if it does not fit now."""
        cache, page = self.cache, self.spec.page_tokens
        if cache.claimed not in (None, self):
            return False
        # SGLang always computes the last prompt token: its output is the first answer token.
        usable = (request.prompt_tokens - 1) // page
        node, matched = cache.match(request.pages[:usable])
        cache.lock(node)
        needed = request.prompt_tokens + request.output_tokens - matched * page
        free = cache.capacity * page - cache.pages * page - cache.reserved
        if needed > free + cache.evictable * page:
            cache.unlock(node)
            cache.claimed = self
            return False
        cache.claimed = None
        if needed > free:
            cache.evict(-((free - needed) // page))
        request.node = node
        request.cached = request.done = request.stored = matched * page
        self.cache.reserved += needed
        self.prompt_tokens += request.prompt_tokens
        self.cached_tokens += request.cached
        return True

    def _store(self, request: Request, tokens: int) -> None:
        """Hand the first `tokens` of a request's KV to the radix cache, whole pages only."""
        page = self.spec.page_tokens
        pages = tokens // page
        if pages * page <= request.stored:
            return
        cache = self.cache
        node = cache.insert(self._pages(request, pages)[request.stored // page :], request.node)
        cache.lock(node)
        if request.node is not None:
            cache.unlock(request.node)
        request.node = node
        self.cache.reserved -= pages * page - request.stored
        request.stored = pages * page

    def _pages(self, request: Request, count: int) -> tuple[Hashable, ...]:
        whole = request.prompt_tokens // self.spec.page_tokens
        if count <= whole:
            return request.pages[:count]
        answer = request.answer_pages or self.cache.new_pages(count - whole)
        return request.pages[:whole] + answer[: count - whole]

    def _release(self, request: Request, computed: int | None = None) -> None:
        """The request has ended: cache what it computed (None: all) and unpin it."""
        total = request.prompt_tokens + request.output_tokens
        # The KV of the last token never exists.
        self._store(request, total - 1 if computed is None else computed)
        self.cache.reserved -= total - request.stored
        if request.node is not None:
            self.cache.unlock(request.node)
            request.node = None
