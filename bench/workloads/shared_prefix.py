"""Groups of prompts with a system prompt a group: the published A/B, SGLang's "gsp" dataset.

`published-16x32` and `published-64x8` have the settings of SGLang PR 31170: every group has one key
and the order is shuffled. `gsp` has the defaults of `sglang.bench_serving`'s dataset
generated-shared-prefix, which sends no key unless told to; `from_bench_serving` reads its flags.
The dataset's separator of two newlines between system prompt and question is left out.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from bench.workloads.base import Call, Source
from bench.workloads.common import (
    CALLS,
    PAGE,
    Count,
    MaybeTokens,
    Params,
    Prompt,
    Rate,
    Tokens,
    WorkloadError,
    key,
    loop,
    once,
    pace,
    rng,
    shared_pages,
)

MOST_PROMPTS = 1_000_000
"""They are shuffled as a whole, in memory."""


class SharedPrefixParams(Params, frozen=True, kw_only=True):
    """Named as SGLang's flags without `gsp`; lengths in tokens."""

    num_groups: Count = 64
    prompts_per_group: Count = 16
    system_prompt_len: MaybeTokens = 2048
    question_len: Tokens = 128
    output_len: Tokens = 256
    send_routing_key: bool = False
    ordered: bool = False
    concurrency: Count = 64
    rate: Rate | None = None

    def __post_init__(self) -> None:
        if self.num_groups * self.prompts_per_group > MOST_PROMPTS:
            raise ValueError(f"num_groups * prompts_per_group: at most {MOST_PROMPTS:,}")


class SharedPrefix:
    """One request a prompt; the seed draws keys and order."""

    page_tokens: int = PAGE

    def __init__(self, name: str, params: SharedPrefixParams) -> None:
        self.name = name
        self.params = p = params
        keys = "one key a group" if p.send_routing_key else "no keys"
        prompts = p.num_groups * p.prompts_per_group
        order = "group after group" if p.ordered else "shuffled"
        self.description = (
            f"{p.num_groups:,} groups of {p.prompts_per_group:,} prompts: system prompt of "
            f"{p.system_prompt_len:,} tokens, question {p.question_len:,}, "
            f"output {p.output_len:,}; "
            f"{keys}, {order}; {pace(p.concurrency, p.rate, 'requests', prompts)}."
        )

    def make(self, seed: int) -> Source:
        p = self.params
        slots = [
            (group, turn) for group in range(p.num_groups) for turn in range(p.prompts_per_group)
        ]
        if not p.ordered:
            rng("gsp", "order", seed).shuffle(slots)
        keys = [
            key("gsp", seed, group) if p.send_routing_key else "" for group in range(p.num_groups)
        ]
        # A session's turns count in the order in which they are sent.
        turns = [0] * p.num_groups
        calls = []
        for group, question in slots:
            calls.append(self._call(group, question, turns[group], keys[group]))
            turns[group] += 1
        return loop(
            map(once, calls),
            concurrency=p.concurrency,
            rate=p.rate,
            random=rng("gsp", "arrivals", seed),
        )

    def _call(self, group: int, question: int, turn: int, group_key: str) -> Call:
        p = self.params
        stream = p.num_groups + group * p.prompts_per_group + question
        prompt = Prompt(stream, shared_pages(group, p.system_prompt_len), p.system_prompt_len)
        prompt.grow(p.question_len)
        return Call(
            id=group * CALLS + turn,
            session=group,
            turn=turn,
            key=group_key,
            pages=prompt.pages(),
            prompt_tokens=prompt.tokens,
            output_tokens=p.output_len,
        )


class _Flags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WorkloadError(f"flags of sglang.bench_serving: {message}")


def from_bench_serving(flags: Sequence[str]) -> dict[str, Any]:
    """Parameters of `gsp` from the flags of a `sglang.bench_serving` command.

    Flags that say nothing about the workload are passed over; settings that this family cannot
    express are refused by name.
    """
    found = vars(_parser().parse_known_args(list(flags))[0])
    for name, value in ONLY.items():
        if found.pop(name) != value:
            flag = "--" + name.replace("_", "-")
            raise WorkloadError(f"flags of sglang.bench_serving: {flag}: only {value} is known")
    if found.get("rate") == "inf":
        # SGLang's default: send at once, held back by --max-concurrency only.
        del found["rate"]
    return found


ONLY = {"gsp_range_ratio": 1.0, "gsp_num_turns": 1, "gsp_group_distribution": "uniform"}
"""SGLang's defaults, where this family has nothing else."""


def _parser() -> argparse.ArgumentParser:
    parser = _Flags(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    names = ("num-groups", "prompts-per-group", "system-prompt-len", "question-len", "output-len")
    for name in names:
        parser.add_argument(f"--gsp-{name}", dest=name.replace("-", "_"))
    for name in ("send-routing-key", "ordered"):
        parser.add_argument(f"--gsp-{name}", dest=name.replace("-", "_"), action="store_true")
    parser.add_argument("--max-concurrency", dest="concurrency")
    parser.add_argument("--request-rate", dest="rate")
    for dest, default in ONLY.items():
        flag = "--" + dest.replace("_", "-")
        parser.add_argument(flag, dest=dest, type=type(default), default=default)
    return parser
