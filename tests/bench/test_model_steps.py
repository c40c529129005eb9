"""Step times: the measured tables, and what uneven steps are read from them."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.model.steps import CALIBRATION, StepParams, StepTimes, Work

DATA = json.loads(CALIBRATION.read_text(encoding="utf-8"))
TABLES = DATA["tables"]
READ = DATA["context_tokens"]
DEFAULT = StepParams().table


def prefill(tokens, cached=0):
    return Work(True, tokens, tokens * (cached + tokens / 2), 0)


def decode(size, context=None):
    return Work(False, size, 0.0, size * READ if context is None else context)


def times(table=DEFAULT, **changes):
    return StepTimes(StepParams(table=table, **changes))


# The tables


def test_the_default_table_is_there():
    assert DEFAULT in TABLES


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("shared", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("table", TABLES)
def test_an_even_step_takes_what_was_measured(table, shared, ranks):
    clock = times(table, shared=shared)
    for tokens, ms in TABLES[table]["prefill_ms"]:
        assert clock.seconds([prefill(tokens)] * ranks) == pytest.approx(ms / 1e3)
    for size, ms in TABLES[table]["decode_ms"]:
        assert clock.seconds([decode(size)] * ranks) == pytest.approx(ms / 1e3)


@pytest.mark.parametrize("table", TABLES)
def test_a_prefill_on_a_cached_prefix_takes_about_what_was_measured(table):
    clock = times(table)
    for cached, new, ms in TABLES[table]["cached_prefill_ms"]:
        assert clock.seconds([prefill(new, cached)] * 8) == pytest.approx(ms / 1e3, rel=0.05)
        assert clock.seconds([prefill(new, cached)] * 8) < clock.seconds([prefill(cached)] * 8)


@pytest.mark.parametrize("table", TABLES)
def test_more_tokens_never_take_less(table):
    clock = times(table)
    for cost in (
        [clock.seconds([prefill(n)] * 8) for n in range(1, 20_000, 37)],
        [clock.seconds([prefill(n, 8192)] * 8) for n in range(1, 4000, 17)],
        [clock.seconds([prefill(512, n)] * 8) for n in range(0, 100_000, 997)],
        [clock.seconds([decode(n)] * 8) for n in range(1, 300)],
        [clock.seconds([decode(n, 40_000)] * 8) for n in range(1, 300)],
        [clock.seconds([decode(8, n)] * 8) for n in range(8, 200_000, 999)],
    ):
        assert cost == sorted(cost)
        assert cost[0] > 0


def test_an_unknown_table_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"table: no 'nothing@h100'.*Qwen3"):
        times("nothing@h100")


@pytest.mark.parametrize(
    "params",
    [
        {"shared": 1.5},
        {"shared": -0.1},
        {"prefill_scale": 0.0},
        {"decode_scale": 1000.0},
        {"context_ns": -1.0},
        {"overhead_ms": -1.0},
        {"nothing": 1},
    ],
)
def test_parameters_have_bounds(params):
    with pytest.raises(msgspec.ValidationError, match=next(iter(params))):
        msgspec.convert(params, StepParams)


# Uneven steps

WORKS = st.lists(
    st.one_of(
        st.none(),
        st.builds(prefill, st.integers(1, 1024), st.integers(0, 8192)),
        st.builds(decode, st.integers(1, 200), st.integers(200, 400_000)),
    ),
    min_size=1,
    max_size=8,
).filter(any)


def kinds(works):
    """Whether it is a prefill step."""
    return any(work.prefill for work in works if work is not None)


@given(works=WORKS, at=st.integers(0, 7))
def test_a_rank_without_work_is_never_slower_than_one_with(works, at):
    idle = [None if i == at else work for i, work in enumerate(works)]
    if any(idle) and kinds(idle) == kinds(works):
        assert times().seconds(idle) <= times().seconds(works) + 1e-12


@given(works=WORKS)
def test_a_step_is_between_that_of_its_mean_and_that_of_its_slowest_rank(works):
    busy = [work for work in works if work is not None]
    # Without shared cost only the slowest counts: of those that prefill, and of those that decode.
    worst = []
    for prefills in {work.prefill for work in busy}:
        most = [
            max(part) for part in zip(*(w[1:] for w in busy if w.prefill == prefills), strict=True)
        ]
        worst.append(Work(prefills, *most))
    tokens = max(work.tokens for work in busy)
    worst = [w._replace(tokens=tokens) if w.prefill else w for w in worst]
    slowest = times(shared=0.0).seconds(worst)
    assert times(shared=0.0).seconds(works) == pytest.approx(slowest)
    assert times().seconds(works) <= slowest + 1e-12
    assert times(shared=1.0).seconds(works) <= slowest + 1e-12


@given(works=WORKS, seed=st.randoms(use_true_random=False))
def test_which_rank_does_what_is_all_the_same(works, seed):
    mixed = list(works)
    seed.shuffle(mixed)
    assert times().seconds(mixed) == pytest.approx(times().seconds(works))


def test_everyone_waits_for_the_slowest():
    alone, beside = [decode(8)] * 8, [prefill(1024), *[decode(8)] * 7]
    assert times().seconds(beside) > 2 * times().seconds(alone)
    assert times().seconds(beside) < times().seconds([prefill(1024)] * 8)
    assert times().seconds([prefill(1024), *[None] * 7]) < times().seconds([prefill(1024)] * 8)


@pytest.mark.parametrize("size", [1, 8, 32, 64, 128, 256])
def test_a_prefill_beside_it_never_makes_a_decode_step_cheaper(size):
    alone, beside = [None, *[decode(size)] * 7], [prefill(1), *[decode(size)] * 7]
    assert times().seconds(beside) >= times().seconds(alone)


def test_tokens_spread_over_ranks_are_cheaper_than_on_one():
    heap, spread = [prefill(1024), *[None] * 7], [prefill(128)] * 8
    assert times().seconds(spread) < times().seconds(heap)


def test_experts_cost_what_the_sum_of_tokens_costs():
    clock = times(shared=1.0)
    uneven = [decode(64, 8 * READ), *[decode(0, 8 * READ)] * 7]
    assert clock.seconds(uneven) == pytest.approx(clock.seconds([decode(8, 8 * READ)] * 8))


# Scales


def test_scales_multiply():
    works = [[prefill(700, 4096)] * 8, [decode(5)] * 8]
    plain = [times().seconds(work) for work in works]
    for scale in (0.5, 2.0):
        slower = [times(prefill_scale=scale).seconds(work) for work in works]
        assert slower == pytest.approx([plain[0] * scale, plain[1]])
        slower = [times(decode_scale=scale).seconds(work) for work in works]
        assert slower == pytest.approx([plain[0], plain[1] * scale])


def test_overhead_is_added_to_every_step():
    for work in (prefill(700), decode(5)):
        more = times(overhead_ms=3.0).seconds([work]) - times().seconds([work])
        assert more == pytest.approx(0.003)


def test_the_price_of_context_leaves_measured_points_as_they_are():
    for ns in (0.0, 6.0, 24.0):
        clock = times(context_ns=ns)
        for size, ms in TABLES[DEFAULT]["decode_ms"]:
            assert clock.seconds([decode(size)] * 8) == pytest.approx(ms / 1e3)
        more = clock.seconds([decode(8, 8 * READ + 1000)] * 8) - clock.seconds([decode(8)] * 8)
        assert more == pytest.approx(1000 * ns / 1e9, abs=1e-12)


# Steps taken at once


def after(work, steps):
    """The same batch some steps later."""
    if work is None:
        return None
    if work.prefill:
        return work._replace(pairs=work.pairs + steps * work.tokens * work.tokens)
    return work._replace(context=work.context + steps * work.tokens)


@given(
    works=st.lists(
        st.one_of(st.none(), st.builds(decode, st.integers(1, 200), st.integers(200, 400_000))),
        min_size=1,
        max_size=8,
    ).filter(any),
    steps=st.integers(1, 500),
)
def test_each_further_decode_step_is_longer_by_what_it_says(works, steps):
    clock = times()
    longer, most = clock.growth(works)
    steps = min(steps, most - 1)
    exact = clock.seconds([after(work, steps) for work in works])
    assert clock.seconds(works) + steps * longer == pytest.approx(exact, rel=1e-9)


@given(cached=st.lists(st.integers(0, 100_000), min_size=1, max_size=8), steps=st.integers(1, 60))
def test_each_further_chunk_is_longer_by_what_it_says(cached, steps):
    clock = times()
    works = [prefill(1024, before) for before in cached]
    exact = clock.seconds([after(work, steps) for work in works])
    longer, most = clock.growth(works)
    assert most > steps
    assert clock.seconds(works) + steps * longer == pytest.approx(exact)
