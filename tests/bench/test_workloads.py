"""Workloads that need no trace: what prompts share, keys, order, loops, specs."""

import os
import subprocess
import sys
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import pytest

from bench.workloads import REGISTRY, Call, Fork, Send, Source, WorkloadError, make_workload
from bench.workloads.common import CALLS, Prompt, shared_pages
from bench.workloads.shared_prefix import from_bench_serving
from tests.bench.workload_driver import (
    by_session,
    check_lengths,
    most_active,
    play,
    play_source,
    shared,
)

SYNTHETIC = [name for name, family in REGISTRY.items() if family.read is None]
SMALL = {
    "published-16x32": "published-16x32:num_groups=4:prompts_per_group=5",
    "published-64x8": "published-64x8:num_groups=4:prompts_per_group=5",
    "gsp": "gsp:num_groups=4:prompts_per_group=5",
    "agentic": "agentic:sessions=6:turns=4:subagents=0.5",
    "hot-key": "hot-key:burst=10:bursts=2:sessions=4:turns=3",
    "short-chats": "short-chats:chats=6",
    "random": "random:requests=20",
}
ROOT = Path(__file__).parent.parent.parent
DUMP = """
import sys
import msgspec
from tests.bench.test_workloads import SMALL
from tests.bench.workload_driver import play
from bench.workloads import make_workload
for spec in SMALL.values():
    sys.stdout.buffer.write(msgspec.json.encode(play(make_workload(spec), 7)))
"""


def call(number: int) -> Call:
    return Call(number, number, 0, "", (), 1, 1)


def test_the_issue_names_them() -> None:
    assert set(SMALL) == set(SYNTHETIC)
    traced = {"mooncake", *(f"agentic-trace-{n}" for n in (32, 64, 128, 256))}
    assert set(REGISTRY) == traced | set(SYNTHETIC)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_defaults_have_sound_lengths_and_the_same_calls_however_long_they_take(name: str) -> None:
    workload = make_workload(name)
    sent = play(workload, 1)
    check_lengths(sent, workload.page_tokens)
    slow = play(workload, 1, lambda call: 0.1 + call.id % 17)
    assert sorted(msgspec.json.encode(each.call) for each in sent) == sorted(
        msgspec.json.encode(each.call) for each in slow
    )


@pytest.mark.parametrize(
    "name", ["published-16x32", "published-64x8", "agentic", "hot-key", "random"]
)
def test_key_sets_differ_by_seed_only(name: str) -> None:
    first, again, other = (
        {each.call.key for each in play(make_workload(SMALL[name]), seed)} for seed in (1, 1, 2)
    )
    assert first == again
    assert "" not in first
    assert not first & other


def test_same_calls_in_every_process() -> None:
    dumps = {
        subprocess.run(
            [sys.executable, "-c", DUMP],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(dumps) == 1
    assert all(dumps)


@pytest.mark.parametrize(
    ("name", "groups", "prompts", "prompt", "output", "prefix", "slots"),
    [
        ("published-16x32", 16, 32, 4096 + 128, 256, 4096, 64),
        ("published-64x8", 64, 8, 8192 + 256, 512, 8192, 128),
    ],
)
def test_published(name, groups, prompts, prompt, output, prefix, slots) -> None:
    sent = play(make_workload(name))
    calls = [each.call for each in sent]
    assert len(calls) == 512
    assert sum(each.at == 0 for each in sent) == slots
    assert {(c.prompt_tokens, c.output_tokens) for c in calls} == {(prompt, output)}
    assert Counter(Counter(c.key for c in calls).values()) == {prompts: groups}
    for a, b in combinations(calls[:64], 2):
        assert shared(a, b) == (prefix // 64 if a.key == b.key else 0)
    order = [c.session for c in calls]
    assert order != sorted(order)
    assert order != [s.call.session for s in play(make_workload(name), 1)]
    for each in by_session(sent).values():
        assert [s.call.turn for s in each] == list(range(prompts))


def test_published_reuse_of_round_robin_is_the_closed_form() -> None:
    """A prefix meets nearly every rank once: about 1 - 585,728 / 2,162,688 = 0.729."""
    cold, total, known = 0, 0, set()
    for index, each in enumerate(play(make_workload("published-16x32"))):
        total += each.call.prompt_tokens
        cold += 128 + 4096 * ((each.call.session, index % 8) not in known)
        known.add((each.call.session, index % 8))
    assert total == 2_162_688
    assert 1 - cold / total == pytest.approx(0.729, abs=0.01)


def test_agentic_turns_grow_and_share_what_came_before() -> None:
    sent = play(make_workload("agentic:sessions=4:subagents=0:system=1000"))
    assert len(sent) == 40
    sessions = by_session(sent)
    for each in sessions.values():
        assert [s.call.turn for s in each] == list(range(10))
        assert len({s.call.key for s in each}) == 1
        for before, after in pairwise(each):
            assert after.at > before.done
            assert shared(before.call, after.call) == before.call.prompt_tokens // 64
            grown = after.call.prompt_tokens - before.call.prompt_tokens
            assert 512 <= grown - before.call.output_tokens <= 2048
    for a, b in combinations(sessions.values(), 2):
        assert shared(a[0].call, b[-1].call) == 1000 // 64


@pytest.mark.parametrize("keys", ["session", "own"])
def test_agentic_sub_agents(keys: str) -> None:
    spec = f"agentic:sessions=8:turns=5:subagents=1:think=0:subagent_keys={keys}:concurrency=8"
    sent = play(make_workload(spec), 0, lambda call: 1.0 + call.id % 3)
    calls = [each.call for each in sent]
    mine = [c for c in calls if c.pages[0] == calls[0].pages[0]]
    subs = [c for c in calls if c.pages[0] != calls[0].pages[0]]
    assert len(mine) == 40
    # A session, its four forks of one to three sub-agents, three turns each.
    assert 8 * 4 * 3 <= len(subs) <= 8 * 4 * 3 * 3
    assert {shared(a, b) >= 4096 // 64 for a, b in combinations(subs[:40], 2)} == {True}
    assert {shared(a, b) for a in mine[:20] for b in subs[:20]} == {0}
    assert len({c.key for c in mine}) == 8
    own = {c.key for c in subs} - {c.key for c in mine}
    assert bool(own) == (keys == "own")
    assert len(own) in (0, len(subs) // 3)


def test_agentic_waits_for_sub_agents() -> None:
    sent = play(
        make_workload("agentic:sessions=1:turns=4:subagents=1:think=0"),
        3,
        lambda call: 1.0 + call.id % 5,
    )
    main = min(each.call.pages[0] for each in sent if each.call.turn == 0)
    over = 0.0
    for each in sorted(sent, key=lambda each: each.at):
        if each.call.pages[0] == main:
            assert each.at >= over
        over = max(over, each.done)


def test_hot_key_bursts_while_others_go_on() -> None:
    sent = play(make_workload("hot-key"))
    assert len(sent) == 3 * 100 + 64 * 12
    hot = [each for each in sent if each.call.session == 0]
    assert sorted(Counter(each.at for each in hot).values()) == [100, 100, 100]
    assert len({each.call.key for each in hot}) == 1
    assert {shared(a.call, b.call) for a, b in combinations(hot[:20], 2)} == {8192 // 64}
    assert any(hot[0].at < each.at < hot[-1].at for each in sent if each.call.session)
    assert not {each.call.key for each in sent if each.call.session} & {hot[0].call.key}


def test_short_chats_grow_from_300_to_2000_tokens() -> None:
    sent = play(make_workload("short-chats"))
    assert len(sent) == 256 * 8
    assert {each.call.key for each in sent} == {""}
    for chat in by_session(sent).values():
        assert [each.call.turn for each in chat] == list(range(8))
        assert chat[0].call.prompt_tokens == 300
        assert chat[-1].call.prompt_tokens == 2000
        for before, after in pairwise(chat):
            grown = after.call.prompt_tokens - before.call.prompt_tokens
            assert 64 <= before.call.output_tokens < grown
            assert shared(before.call, after.call) == before.call.prompt_tokens // 64


def test_random_shares_nothing() -> None:
    calls = [each.call for each in play(make_workload("random"))]
    assert len(calls) == len({c.key for c in calls}) == 1024
    pages = [page for c in calls for page in c.pages]
    assert len(set(pages)) == len(pages)
    assert {each.call.key for each in play(make_workload("random:keyed=false"))} == {""}


@pytest.mark.parametrize("name", ["agentic", "short-chats", "random"])
def test_slots_bound_what_is_active(name: str) -> None:
    spec = SMALL[name] + ":concurrency=3"
    sent = play(make_workload(spec), 0, lambda call: 1.0 + call.id % 2)
    assert most_active(sent) == 3


@pytest.mark.parametrize("name", ["published-16x32", "agentic", "short-chats", "random"])
def test_open_loop_does_not_wait(name: str) -> None:
    spec = SMALL[name] + ":rate=100"
    sent = play(make_workload(spec), 0, lambda _: 1e6)
    quick = play(make_workload(spec), 0, lambda _: 1e-6)
    first = {each.call.id: each.at for each in sent if each.at < 1e6}
    starts = {each.call.id: each.at for each in quick if each.call.id in first}
    assert first == starts
    assert len(first) >= 6
    assert len(set(first.values())) == len(first)


def test_a_fork_ends_with_the_last_of_its_scripts() -> None:
    def team(number: int):
        yield Send(call(number))
        yield Send(call(number + 1), 0.5)

    def nothing():
        return
        yield

    def script():
        yield Send(call(0))
        yield Fork([team(10), nothing(), team(20)], 2.0)
        yield Fork([nothing()], 1.0)
        yield Fork([], 1.0)
        yield Send(call(30))

    sent = play_source(Source([(0.0, script())], 1), lambda each: 5.0 if each.id == 21 else 1.0)
    assert {each.call.id: each.at for each in sent} == {
        0: 0.0,
        10: 3.0,
        20: 3.0,
        11: 4.5,
        21: 4.5,
        30: 11.5,
    }


def test_a_partly_filled_page_is_never_another_prompts() -> None:
    prompt = Prompt(5, shared_pages(1, 130), 130)
    prompt.grow(10)
    first = prompt.pages()
    again = prompt.pages()
    prompt.grow(100)
    assert (len(first), len(prompt.pages())) == (3, 4)
    assert first[:2] == again[:2] == prompt.pages()[:2] == tuple(shared_pages(1, 130))
    assert len({first[2], again[2], prompt.pages()[2]}) == 3


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nope", "no workload 'nope'; there are: published-16x32,"),
        ("", "no workload ''"),
        ("random:requests", "'requests': parameters are written as param=value"),
        ("random:requests=0", "random: requests: Expected `int` >= 1"),
        ("random:requests=many", "random: requests: Expected `int`, got `str`"),
        ("random:rate=0", "random: rate: Expected `float` > 0.0"),
        ("random:rate=nan", "random: rate: "),
        ("random:turns=3", "random: no parameter 'turns'; there are: requests,"),
        ("random:rate=1:concurrency=2", "random: rate: open loop, so it excludes concurrency"),
        ("random:requests=1:requests=2", "random: requests is given twice"),
        ("random:prompt_min=9000", "prompt_min: at most prompt_max"),
        ("random:output_min=900", "output_min: at most output_max"),
        ("agentic:new-min=9000", "new_min: at most new_max"),
        ("agentic:output_min=9000", "output_min: at most output_max"),
        ("agentic:turns=100000", "turns: fewer than 1,000,000 calls"),
        ("agentic:subagent_keys=both", "agentic: subagent_keys: Invalid enum value 'both'"),
        ("short-chats:system=300", "system: less than first"),
        ("short-chats:last=400", "last: too little"),
        ("short-chats:output_min=200", "output_min: at most output_max"),
        ("hot-key:new_min=9000", "new_min: at most new_max"),
        ("hot-key:output_min=9000", "output_min: at most output_max"),
        ("hot-key:burst=100000:bursts=100", "bursts: fewer than"),
    ],
)
def test_bad_specs_name_what_is_wrong(spec: str, said: str) -> None:
    with pytest.raises(WorkloadError) as error:
        make_workload(spec)
    assert said in str(error.value)


def test_spec_sets_parameters() -> None:
    workload = make_workload("published-16x32:num-groups=2:prompts_per_group=3:concurrency=4")
    assert workload.name == "published-16x32:num-groups=2:prompts_per_group=3:concurrency=4"
    assert workload.description.startswith("2 groups of 3 prompts: system prompt of 4,096 tokens")
    assert len(play(workload)) == 6


def test_call_ids_leave_room_for_the_turns_of_a_session() -> None:
    for each in play(make_workload("agentic")):
        assert each.call.id == each.call.session * CALLS + each.call.turn


def test_flags_of_bench_serving() -> None:
    flags = (
        "--backend sglang --dataset-name generated-shared-prefix --seed 3 --gsp-num-groups 4 "
        "--gsp-prompts-per-group=5 --gsp-system-prompt-len 640 --gsp-question-len 60 "
        "--gsp-output-len 7 --gsp-send-routing-key --max-concurrency 2 --request-rate inf"
    )
    given = from_bench_serving(flags.split())
    spec = ":".join(["gsp", *(f"{name}={value}" for name, value in given.items())])
    sent = play(make_workload(spec))
    assert len(sent) == 20
    assert {(s.call.prompt_tokens, s.call.output_tokens) for s in sent} == {(700, 7)}
    assert len({s.call.key for s in sent}) == 4
    assert sum(s.at == 0 for s in sent) == 2
    assert from_bench_serving([]) == {}
    assert from_bench_serving(["--request-rate", "3"]) == {"rate": "3"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gsp-num-turns", "2"], "--gsp-num-turns: only 1 is known"),
        (["--gsp-range-ratio", "0.5"], "--gsp-range-ratio: only 1.0 is known"),
        (["--gsp-group-distribution", "zipf"], "--gsp-group-distribution: only uniform"),
        (["--gsp-num-groups"], "--gsp-num-groups: expected one argument"),
    ],
)
def test_flags_that_cannot_be_expressed(flags: list[str], said: str) -> None:
    with pytest.raises(WorkloadError, match="bench_serving") as error:
        from_bench_serving(flags)
    assert said in str(error.value)
