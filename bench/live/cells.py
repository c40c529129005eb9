"""One cell of a live A/B: one arm, one key set, once. Flush, warm up, run, read the counters."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import msgspec

from bench.live import counters, serving
from bench.live.apis import APIS, Ask, Routed
from bench.live.client import REQUEST_SECONDS, Client, clock
from bench.live.drive import Done, Drive
from bench.live.rows import Journal, idle_share, make_rows
from bench.live.target import Facts, Sidecar, TargetError, flush
from bench.live.tokens import Tokens, token_range
from bench.outcome import Outcome, Row, Sample
from bench.workloads.base import Workload
from sidecar.orders import PolicyState

_PAGE = 64
Loaded: TypeAlias = Drive | tuple[list[Row], float]
CLIENTS = ("own", "bench_serving")
_WARM_UP_OUTPUT = 16


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How cells are run; durations in real seconds."""

    time_scale: float = 1.0
    """Stretches think times and arrivals."""
    api: str = "completions"
    """One of `apis.APIS`."""
    client: str = "own"
    """One of CLIENTS."""
    serving_seconds: float = 7200.0
    """Longest run of bench_serving."""
    request_seconds: float = REQUEST_SECONDS
    flush_seconds: float = 60.0
    flush_pause: float = 0.5
    sample_seconds: float = 0.25
    """Between two looks at the sidecar's load views; 0: none."""
    warm_up: tuple[int, ...] = (1024,)
    """Prompt tokens of the warm-up before each cell, a round each."""
    burn_in: tuple[int, ...] = (128, 1024, 4096, 8192)
    """The same before the first cell: shapes that a fresh server has not compiled yet."""
    vocabulary: int | None = None
    """Where the server does not tell."""


class Cell(msgspec.Struct, frozen=True):
    """What is measured at one go."""

    arm: str
    seed: int
    repeat: int


class Bench(msgspec.Struct):
    """What cells are measured on. sidecar: None where a stock method or a gateway decides.

    gateway: the URL requests are sent to; empty: the server's own. Everything else, the warm-up
    too, goes to the server, so that a new gateway remembers nothing.
    """

    facts: Facts
    ranks: int
    options: Options
    sidecar: Sidecar | None = None
    instance: str = ""
    warm: bool = False
    gateway: str = ""

    def measure(
        self,
        workload: Workload,
        cell: Cell,
        policy: PolicyState | None,
        on_done: Callable[[Done], None],
    ) -> Outcome:
        """Run a cell under the policy in force. Raises TargetError and DriveError."""
        flush(self.facts.url, self.options.flush_seconds, self.options.flush_pause)
        return asyncio.run(self._measure(workload, cell, policy, on_done))

    async def _measure(
        self,
        workload: Workload,
        cell: Cell,
        policy: PolicyState | None,
        on_done: Callable[[Done], None],
    ) -> Outcome:
        facts = self.facts
        async with self._client(facts.url) as direct, self._client(self.gateway) as routed:
            client = routed if self.gateway else direct
            await self._warm_up(direct)
            before = await self._settled(client)
            begun = clock()
            journal = Journal(facts.journal)
            load = self._load(client, workload, cell.seed, on_done)
            loaded, samples = await self._sampled(load, begun)
            counts = self._counts()
            after = await self._settled(client)
        if isinstance(loaded, Drive):
            homes = self.ranks if policy and policy.name == "prefix_affinity" else 0
            rows = make_rows(loaded, facts.time_scale, journal.read(), homes)
            seconds = loaded.seconds() / facts.time_scale
        else:
            rows, seconds = loaded
        more = self._more(cell, policy) | self._counted(before, counts, after)
        return self._outcome(workload, cell, rows, samples, seconds, more)

    def _client(self, url: str) -> Client:
        facts, options = self.facts, self.options
        api = Routed() if url == self.gateway else APIS[options.api]()
        return Client(url, facts.model, api, facts.cache_report, options.request_seconds)

    async def _load(
        self, client: Client, workload: Workload, seed: int, on_done: Callable[[Done], None]
    ) -> Loaded:
        """Send the workload: a drive that is over, or the rows and seconds of bench_serving."""
        facts, options = self.facts, self.options
        if options.client == "bench_serving":
            if options.time_scale != 1 or facts.time_scale != 1:
                raise TargetError("sglang.bench_serving knows no time scale but 1")
            return await serving.send(workload, facts, seed, options.serving_seconds)
        salt = f"{workload.name}/{seed}"
        tokens = Tokens(salt, workload.page_tokens, token_range(facts.vocabulary))
        scale = options.time_scale * facts.time_scale
        source = workload.make(seed)
        drive = Drive(source, lambda call: client.call(call, tokens), scale, on_done)
        await drive.run()
        return drive

    async def _warm_up(self, client: Client) -> None:
        """Prompts of no workload: one to every rank, and as many as the policy places."""
        lengths = self.options.warm_up if self.warm else self.options.burn_in
        tokens = Tokens("warm-up", _PAGE, token_range(self.facts.vocabulary))
        limit = (self.facts.max_prompt or 1 << 30) - _WARM_UP_OUTPUT
        page = 0
        for length in (min(each, limit) for each in lengths):
            asks = []
            for number in range(2 * self.ranks):
                pages = range(page, page + -(-length // _PAGE))
                page = pages.stop
                rank = number if number < self.ranks else None
                key = "" if rank is not None else f"bench-warm-up-{number}"
                asks.append(Ask(tokens.prompt(pages, length), _WARM_UP_OUTPUT, key, rank))
            results = await asyncio.gather(*map(client.ask, asks))
            if all(result.error for result in results):
                raise TargetError(f"the warm-up failed: {results[-1].error}")
        self.warm = True

    async def _settled(self, client: Client) -> "_Counts":
        """Counters after one more request, with which the hook tells what it did before."""
        if self.sidecar is not None:
            prompt = Tokens("settle", 16, token_range(self.facts.vocabulary)).prompt((0,), 16)
            result = await client.ask(Ask(prompt, 1, "bench-settle"))
            if result.error:
                raise TargetError(f"the target does not answer: {result.error}")
        return self._counts()

    def _counts(self) -> "_Counts":
        url = self.facts.url
        counts = _Counts(counters.read_engine(url))
        if self.facts.simulated:
            counts.steps = counters.read_steps(url)
        if self.sidecar is not None:
            counts.sidecar = counters.read_sidecar(self.sidecar.metrics(), self.instance)
        return counts

    async def _sampled(
        self, load: Coroutine[Any, Any, Loaded], begun: float
    ) -> tuple[Loaded, list[Sample]]:
        """Await the load, and look at the ranks meanwhile."""
        samples: list[Sample] = []
        sampler = asyncio.create_task(self._sample(begun, samples))
        try:
            return await load, samples
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)

    async def _sample(self, begun: float, samples: list[Sample]) -> None:
        while self.sidecar is not None and self.options.sample_seconds:
            with contextlib.suppress(TargetError):
                status = await asyncio.to_thread(self.sidecar.status)
                at = (clock() - begun) / self.facts.time_scale
                for each in status["instances"]:
                    if each["instance"] == self.instance:
                        loads = [rank["load"] for rank in each["ranks"]]
                        samples.append(Sample(round(at, 3), loads))
            await asyncio.sleep(self.options.sample_seconds)

    def _more(self, cell: Cell, policy: PolicyState | None) -> dict[str, Any]:
        more: dict[str, Any] = {"repeat": cell.repeat, "client": self.options.client}
        more["api"] = self.options.api
        more |= {"time_scale": self.options.time_scale, "about": self.facts.about}
        if policy is not None:
            told = {"name": policy.name, "params": policy.params, "version": policy.version}
            more["policy"] = told
        return more

    def _counted(self, before: "_Counts", counts: "_Counts", after: "_Counts") -> dict[str, Any]:
        found: dict[str, Any] = {"engine": counters.engine_rise(before.engine, counts.engine)}
        found["steps"] = counters.steps_rise(before.steps, counts.steps)
        if before.sidecar is not None and counts.sidecar is not None and after.sidecar is not None:
            found["sidecar"] = counters.decided(before.sidecar, counts.sidecar)
            found["hook"] = counters.told(before.sidecar, after.sidecar)
        return found

    def _outcome(
        self,
        workload: Workload,
        cell: Cell,
        rows: list[Row],
        samples: list[Sample],
        seconds: float,
        more: dict[str, Any],
    ) -> Outcome:
        decided, told = more.get("sidecar") or {}, more.get("hook") or {}
        steps = more["steps"]
        spills, bypassed = decided.get("spills"), told.get("bypassed")
        return Outcome(
            workload=workload.name,
            arm=cell.arm,
            seed=cell.seed,
            kind="simulated" if self.facts.simulated else "live",
            ranks=self.ranks,
            rows=rows,
            seconds=seconds,
            samples=samples,
            idle_share=steps["idle_share"] if steps else idle_share(samples),
            spills=None if spills is None else sum(spills.values()),
            fallbacks=decided.get("fallbacks"),
            bypasses=None if bypassed is None else sum(bypassed.values()),
            more=more,
        )


class _Counts(msgspec.Struct):
    engine: dict[str, float] | None
    steps: dict[str, float] | None = None
    sidecar: counters.Samples | None = None
