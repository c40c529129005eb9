"""What may happen, as rules: hypothesis puts them together and looks for what breaks."""

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.model.controller import Request
from tests.model.draws import (
    HOUR_NS,
    LATE,
    POLICIES,
    RANK,
    REQUESTS,
    SOME,
    WAITS,
)
from tests.model.network import FATES
from tests.model.world import RANKS, World
from tests.support import STALE_SECONDS


class Model(RuleBasedStateMachine):
    """One server and its sidecar. policy: the one it starts with."""

    policy = "kv_affinity"

    @initialize(greeted=st.booleans(), reported=st.booleans(), fate=st.sampled_from(FATES))
    def begin(self, greeted: bool, reported: bool, fate: str) -> None:
        self.world = World(self.policy)
        self._greet(fate if greeted else "query lost")
        if reported:
            for scheduler in self.world.schedulers.values():
                scheduler.report()
            self.world.deliver_reports()

    def _greet(self, fate: str) -> None:
        self.world.controller.socket.fate = fate
        self.world.controller.client.greet()

    # Requests

    @rule(request=REQUESTS, times=SOME, fate=st.sampled_from(FATES))
    def ask(self, request: Request, times: int, fate: str) -> None:
        """Like requests one by one: turns of a conversation, or samples of one prompt."""
        for _ in range(times):
            self.world.controller.socket.fate = fate
            self.world.controller.ask([request])
            self.world.clock.wait(0.001)

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=6), fate=st.sampled_from(FATES))
    def ask_batch(self, requests: list[Request], fate: str) -> None:
        self.world.controller.socket.fate = fate
        self.world.controller.ask(requests)

    @rule(requests=st.lists(REQUESTS, min_size=4, max_size=12))
    def ask_in_turn(self, requests: list[Request]) -> None:
        """Traffic of a good day."""
        self.ask_each(requests)

    def ask_each(self, requests: list[Request]) -> None:
        """What waits for no answer is answered soon too."""
        world = self.world
        world.controller.socket.fate = "answered"
        for one in requests:
            world.controller.ask([one])
            world.deliver_all()
            world.clock.wait(0.004)

    @rule(request=REQUESTS, rank=RANK)
    def explicit(self, request: Request, rank: int) -> None:
        if rank in self.world.live:
            self.world.controller.explicit(request, rank)

    @rule(times=SOME)
    def health_check(self, times: int) -> None:
        for _ in range(times):
            self.world.controller.health_check()

    # Ranks

    @rule(rank=RANK, count=SOME, cached=st.sampled_from([0.0, 0.5, 1.0]))
    def work(self, rank: int, count: int, cached: float) -> None:
        """A few steps of one scheduler."""
        scheduler = self.world.schedulers.get(rank)
        if scheduler is not None:
            scheduler.take_in(count)
            scheduler.prefill(count // 2, cached)
            scheduler.finish(count // 3)
            scheduler.report()

    @rule(count=st.integers(0, 20), snapshot=st.booleans())
    def everybody_works(self, count: int, snapshot: bool) -> None:
        for scheduler in self.world.schedulers.values():
            scheduler.take_in(20)
            scheduler.prefill(count, 0.5)
            scheduler.finish(count)
            if snapshot:
                scheduler.snapshot()
            scheduler.report()
        self.world.clock.wait(0.01)

    @rule(rank=RANK, requests=st.lists(REQUESTS, min_size=4, max_size=8))
    def only_one_reports(self, rank: int, requests: list[Request]) -> None:
        """The others are silent for longer than the limit."""
        world = self.world
        if rank in world.schedulers:
            for _ in range(16):
                world.clock.wait(STALE_SECONDS / 10)
                world.schedulers[rank].report()
                world.deliver_reports()
            self.ask_each(requests)

    @rule(rank=RANK, broken=st.booleans(), flush=st.booleans())
    def disturb(self, rank: int, broken: bool, flush: bool) -> None:
        """Nobody takes its reports, or somebody does again; its cache is emptied."""
        scheduler = self.world.schedulers.get(rank)
        if scheduler is not None:
            scheduler.socket.broken = broken
            if flush and not scheduler.running:
                scheduler.reporter.flush()

    @rule(rank=RANK, dies=st.booleans())
    def leave(self, rank: int, dies: bool) -> None:
        world = self.world
        world.live = [one for one in world.live if one != rank]
        if dies:
            world.schedulers.pop(rank, None)

    @rule(rank=RANK)
    def come(self, rank: int) -> None:
        world = self.world
        if rank not in world.schedulers:
            world.start_scheduler(rank)
        world.live = sorted({*world.live, rank})

    # Restarts

    @rule(wait=st.sampled_from([0.0, 700.0]), rank=RANK)
    def restart_scheduler(self, wait: float, rank: int) -> None:
        if rank in self.world.schedulers:
            self.world.clock.wait(wait)
            self.world.start_scheduler(rank)

    @rule(
        wait=st.sampled_from([0.0, 700.0]),
        step=st.sampled_from([0, 0, HOUR_NS, -HOUR_NS]),
        drained=st.booleans(),
        fate=st.sampled_from(FATES),
    )
    def restart_controller(self, wait: float, step: int, drained: bool, fate: str) -> None:
        self.world.clock.wait(wait)
        self.world.clock.wall += step
        self.world.restart_controller(drained=drained)
        self._greet(fate)

    @rule(wait=st.sampled_from([0.0, 700.0]), first=st.booleans())
    def restart_server(self, wait: float, first: bool) -> None:
        """first: the schedulers are there before the controller."""
        world = self.world
        world.clock.wait(wait)
        if not first:
            world.restart_controller(drained=False)
        for rank in world.schedulers:
            world.start_scheduler(rank)
        if first:
            world.restart_controller(drained=False)
        self._greet("answered")

    @rule(lingers=st.booleans())
    def restart_sidecar(self, lingers: bool) -> None:
        self.world.restart_sidecar(lingers=lingers)

    @rule(policy=st.sampled_from(POLICIES))
    def swap_policy(self, policy: str) -> None:
        self.world.swap(policy)

    # Messages

    @precondition(lambda self: self.world.network.queries)
    @rule(at=LATE, keep=st.booleans(), to_old=st.booleans())
    def deliver_query(self, at: int, keep: bool, to_old: bool) -> None:
        last = len(self.world.network.queries) - 1
        self.world.deliver_query(min(at, last), keep=keep, to_old=to_old)

    @precondition(lambda self: self.world.network.replies)
    @rule(at=LATE, keep=st.booleans())
    def deliver_reply(self, at: int, keep: bool) -> None:
        last = len(self.world.network.replies) - 1
        self.world.deliver_reply(min(at, last), keep=keep)

    @precondition(lambda self: self.world.network.reports)
    @rule(at=LATE, keep=st.booleans(), to_old=st.booleans())
    def deliver_report(self, at: int, keep: bool, to_old: bool) -> None:
        last = len(self.world.network.reports) - 1
        self.world.deliver_report(min(at, last), keep=keep, to_old=to_old)

    @precondition(lambda self: self.world.network.reports)
    @rule()
    def deliver_reports(self) -> None:
        self.world.deliver_reports()

    @rule(which=st.sampled_from(["queries", "replies", "reports"]))
    def lose(self, which: str) -> None:
        getattr(self.world.network, which).clear()

    @rule(reachable=st.booleans())
    def connect(self, reachable: bool) -> None:
        self.world.network.reachable = reachable

    @rule(seconds=WAITS)
    def wait(self, seconds: float) -> None:
        self.world.clock.wait(seconds)

    @rule(hours=st.sampled_from([-1, 1]))
    def set_wall_clock(self, hours: int) -> None:
        self.world.clock.wall += hours * HOUR_NS

    @precondition(lambda self: self.world.live)
    @rule(everything=st.booleans())
    def rest(self, everything: bool) -> None:
        world = self.world
        if everything:
            world.idle()
        world.rest()
        world.check_rest()
        world.check_past(4)

    @invariant()
    def loads_are_sound(self) -> None:
        if hasattr(self, "world"):
            self.world.daemon.check_view()

    def teardown(self) -> None:
        """Every run ends at rest, idle."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for rank in range(RANKS):
            self.come(rank)
        world.rest()
        world.check_rest()
        world.idle()
        world.rest()
        world.check_rest()
        world.finish_daemon()
