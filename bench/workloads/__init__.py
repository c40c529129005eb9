"""Workloads by name: `make_workload("published-16x32:concurrency=32", traces)`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.workloads import (
    agentic,
    hot_key,
    mooncake,
    random_prompts,
    session_format,
    shared_prefix,
    short_chats,
    trace_sessions,
)
from bench.workloads.base import Call, Fork, Script, Send, Source, Workload
from bench.workloads.common import MissingTraces, Params, WorkloadError

__all__ = [
    "REGISTRY",
    "TRACES",
    "Call",
    "Family",
    "Fork",
    "MissingTraces",
    "Script",
    "Send",
    "Source",
    "Workload",
    "WorkloadError",
    "make_workload",
]

TRACES = Path("../shared/traces")
"""Where traces are looked for by default, from the repository's root."""


class Family(msgspec.Struct, frozen=True):
    """How to make the workloads of one name."""

    params: type[Params]
    make: Callable[..., Workload]
    """From name and parameters, and what `read` gave if there is one."""
    defaults: dict[str, Any] = {}
    """Where they differ from those of `params`."""
    read: Callable[[Path], Any] | None = None
    """Reads the trace that the workload needs."""


def _published(groups: int, prompts: int, **lengths: int) -> Family:
    defaults = {"num_groups": groups, "prompts_per_group": prompts, "send_routing_key": True}
    return Family(
        shared_prefix.SharedPrefixParams, shared_prefix.SharedPrefix, {**defaults, **lengths}
    )


def _trace(concurrency: int) -> Family:
    return Family(
        trace_sessions.TraceSessionsParams,
        trace_sessions.TraceSessions,
        {"concurrency": concurrency},
        session_format.read,
    )


REGISTRY = {
    "published-16x32": _published(
        16, 32, system_prompt_len=4096, question_len=128, output_len=256, concurrency=64
    ),
    "published-64x8": _published(
        64, 8, system_prompt_len=8192, question_len=256, output_len=512, concurrency=128
    ),
    "gsp": Family(shared_prefix.SharedPrefixParams, shared_prefix.SharedPrefix),
    "agentic": Family(agentic.AgenticParams, agentic.Agentic),
    "agentic-trace-32": _trace(32),
    "agentic-trace-64": _trace(64),
    "agentic-trace-128": _trace(128),
    "agentic-trace-256": _trace(256),
    "mooncake": Family(mooncake.MooncakeParams, mooncake.Mooncake, read=mooncake.read),
    "hot-key": Family(hot_key.HotKeyParams, hot_key.HotKey),
    "short-chats": Family(short_chats.ShortChatsParams, short_chats.ShortChats),
    "random": Family(random_prompts.RandomParams, random_prompts.RandomPrompts),
}


def make_workload(spec: str, traces: Path = TRACES) -> Workload:
    """spec: `name[:param=value...]`; in parameter names, `-` and `_` are the same."""
    name, *pairs = spec.split(":")
    family = REGISTRY.get(name)
    if family is None:
        raise WorkloadError(f"no workload {name!r}; there are: {', '.join(REGISTRY)}")
    params = _convert(name, family, _given(name, pairs))
    if family.read is None:
        return family.make(spec, params)
    return family.make(spec, params, family.read(traces))


def _given(name: str, pairs: list[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in pairs:
        field, equals, value = pair.partition("=")
        field = field.strip().replace("-", "_")
        if not equals or not field:
            raise WorkloadError(f"{name}: {pair!r}: parameters are written as param=value")
        if field in given:
            raise WorkloadError(f"{name}: {field} is given twice")
        given[field] = value.strip()
    return given


def _convert(name: str, family: Family, given: dict[str, str]) -> Params:
    fields = family.params.__struct_fields__
    for field in given:
        if field not in fields:
            raise WorkloadError(f"{name}: no parameter {field!r}; there are: {', '.join(fields)}")
    if "rate" in given and "concurrency" in given:
        raise WorkloadError(f"{name}: rate: open loop, so it excludes concurrency")
    try:
        return msgspec.convert({**family.defaults, **given}, family.params, strict=False)
    except msgspec.ValidationError as error:
        problem, _, field = str(error).partition(" - at `$.")
        where = f"{field.rstrip('`')}: " if field else ""
        raise WorkloadError(f"{name}: {where}{problem}") from error
