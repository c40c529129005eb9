"""A/B on one warm server: the sidecar's policy is swapped between arms, nothing is restarted.

Arms are interleaved A B B A ..., so that a drift of the machine does not favour one. Each cell has
an empty cache and the same prompts and keys as its counterparts of the other arms.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from bench.arms import ARMS, POLICIES, ArmError, split_spec
from bench.live.cells import Bench, Cell, Options
from bench.live.drive import Done
from bench.live.peers import is_peer
from bench.live.target import PolicyControl, Sidecar, TargetError, find_instance, inspect
from bench.outcome import Outcome
from bench.workloads import Workload
from sidecar.errors import ConfigError, ControlError
from sidecar.orders import PolicyState
from sidecar.policies import REGISTRY, make_policy

STOCK = ("round_robin", "total_requests", "total_tokens")
"""SGLang's own methods: fixed when the server is started."""
_SAY_SECONDS = 10.0


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def policy_of(spec: str) -> tuple[str, dict[str, Any]]:
    """Policy and parameters of an arm that the sidecar can switch to. Raises ArmError."""
    name, given = split_spec(spec)
    if name not in POLICIES:
        raise ArmError(f"arm {spec!r}: {_refusal(name)}")
    policy = POLICIES[name]
    try:
        checked = msgspec.convert(given, REGISTRY[policy].Params, strict=False)
        params: dict[str, Any] = msgspec.to_builtins(checked)
        make_policy(policy, params)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ArmError(f"arm {spec!r}: {error}") from None
    return policy, params


def _refusal(name: str) -> str:
    can = f"a running server can switch to {', '.join(POLICIES)}"
    if name in STOCK:
        return f"SGLang's own {name} is fixed at its start (MODEL=... starts servers for it); {can}"
    if is_peer(name):
        return f"{name} is measured at a server without the hook (MODEL=... starts it); {can}"
    if name.startswith("smg_"):
        return f"gateways are started with their server (MODEL=...); {can}"
    if name in ARMS:
        return f"there is no such policy in the sidecar, only in the model (bench.sim); {can}"
    return f"no arm {name!r}; {can}"


def plan(arms: Sequence[str], seeds: Sequence[int], repeats: int) -> list[Cell]:
    """Cells in the order in which they are measured: A B, B A, ... for one key set after another.

    Every key set sees each order equally often, as far as `repeats` is even.
    """
    cells = []
    for repeat in range(repeats):
        for index, seed in enumerate(seeds):
            order = arms if (repeat + index) % 2 == 0 else arms[::-1]
            cells += [Cell(arm, seed, repeat) for arm in order]
    return cells


class Progress:
    """Says which cell runs, how far it is, and how long all of them will still take."""

    def __init__(self, cells: int, tell: Callable[[str], None] = say) -> None:
        self.cells, self.tell = cells, tell
        self.finished = 0
        self._totals: dict[int, int] = {}
        self._begun = self._next = time.monotonic()
        self._done = self._failed = 0
        self._label = ""
        self._seed = 0

    def begin(self, workload: str, cell: Cell) -> None:
        self._done = self._failed = 0
        self._seed = cell.seed
        place = f"[{self.finished + 1}/{self.cells}]"
        self._label = f"{place} {workload}, {cell.arm}, key set {cell.seed}, run {cell.repeat + 1}"
        self._next = time.monotonic() + _SAY_SECONDS
        self.tell(f"{self._label}{self._left()}")

    def __call__(self, done: Done) -> None:
        self._done += 1
        self._failed += bool(done.result.error)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SAY_SECONDS
            total = self._totals.get(self._seed)
            of = f"/{total}" if total else ""
            self.tell(f"{self._label}: {self._done}{of} requests, {self._failed} failed")

    def end(self) -> None:
        self.finished += 1
        self._totals[self._seed] = self._done
        if self._failed:
            self.tell(f"{self._label}: {self._failed} of {self._done} requests failed")

    def _left(self) -> str:
        if not self.finished:
            return ""
        spent = time.monotonic() - self._begun
        left = spent / self.finished * (self.cells - self.finished)
        return f"; about {left / 60:.1f} min left" if left >= 60 else f"; about {left:.0f} s left"


@contextmanager
def restored(control: PolicyControl) -> Iterator[PolicyState]:
    """Whatever happens inside, the policy before is in force again afterwards."""
    before = control.show()
    try:
        yield before
    finally:
        try:
            control.set_policy(before.name, before.params)
        except ControlError as error:
            # Not raised: what made us leave says more, and the cells measured are kept.
            say(f"the policy before, {before.name} {before.params}, is not restored: {error}")


def run_live(
    target: str,
    control: PolicyControl,
    admin: str,
    workload: Workload,
    arms: Sequence[str],
    seeds: Sequence[int],
    repeats: int = 2,
    *,
    options: Options | None = None,
    tell: Callable[[str], None] = say,
) -> Iterator[Outcome]:
    """Measure arms at a running server; an outcome a cell, as soon as it is there.

    target: its URL. control, admin: of its sidecar. Raises ArmError, TargetError, ControlError or
    DriveError; what was yielded before stays valid. Close the generator, or use it up.
    """
    policies = {arm: policy_of(arm) for arm in arms}
    options = options or Options()
    facts = inspect(target, options.vocabulary)
    sidecar = Sidecar(admin)
    with restored(control):
        instance = find_instance(facts, sidecar, control)
        bench = Bench(facts, sidecar.ranks(instance), options, sidecar, instance)
        cells = plan(arms, seeds, repeats)
        progress = Progress(len(cells), tell)
        for cell in cells:
            progress.begin(workload.name, cell)
            policy = control.set_policy(*policies[cell.arm])
            outcome = bench.measure(workload, cell, policy, progress)
            _check_same(policy, control.show())
            progress.end()
            yield outcome


def _check_same(policy: PolicyState, now: PolicyState) -> None:
    if (now.name, now.version) != (policy.name, policy.version):
        raise TargetError(
            f"in mid-run the sidecar was restarted, or somebody set its policy: "
            f"{policy.name} version {policy.version} became {now.name} {now.version}"
        )
