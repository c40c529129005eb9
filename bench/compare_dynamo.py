"""Is our prefix-cache reuse right? The same requests through NVIDIA Dynamo's simulator.

    python compare_dynamo.py TRACES OUT.json [--workers 8] [--capacity 1048576 ...] [--repeats 3]

TRACES is the folder with `mooncake_conversation_trace.jsonl.gz` (kvcache-ai/Mooncake). It measures
**reuse**, the cached share of all prompt tokens, for two workloads and each cache capacity:

- `mooncake`: the conversation trace at its own times, 512-token blocks;
- `published-16x32`: 16 groups of 32 prompts in shuffled order (`--seed`), 4096 tokens of system
  prompt a group, 128 of question, 256 of output, 64 requests at a time, 128-token blocks.

Each goes through three counts: `counter`, the plain one below (requests strictly in order, request
i to worker i % N, its prompt cached at once, outputs not), and Dynamo's offline replay with its
`round_robin` and its `kv_router`. The KV router breaks ties at random, without a seed: its figure
is the mean of the repeats and their range. Neither Dynamo nor this file uses code of `bench`.

Dynamo needs no GPU for this, but pins its own dependencies; give it an environment of its own:

    python -m venv DIR && DIR/bin/pip install ai-dynamo==1.4.0 ai-dynamo-runtime==1.4.0
    DIR/bin/python bench/compare_dynamo.py TRACES OUT.json

(`--no-deps` does: only `dynamo.replay` and its Rust core are imported.) Read with care: the engine
simulated is Dynamo's vLLM one, where a prefix counts as cached from the moment that a request with
it is admitted. Its SGLang one agrees only where `chunked_prefill_size` exceeds every prompt: else
it counts a prompt's own earlier chunks as reused (0.74 on Mooncake, where not even one boundless
cache for all gives more than 0.374).
"""

import argparse
import gzip
import importlib
import json
import os
import random
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

VERSION = "1.4.0"
MOONCAKE = "mooncake_conversation_trace.jsonl.gz"
COLUMNS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})

Request = dict[str, Any]
Replay = Callable[..., float]


@dataclass(frozen=True)
class Workload:
    name: str
    block_tokens: int
    requests: list[Request]
    concurrency: int | None = None
    """Closed loop with so many requests at a time; None: each at its own time."""


@dataclass(frozen=True)
class Row:
    workload: str
    capacity_tokens: int
    counter: float
    dynamo_round_robin: float
    dynamo_kv_router: float
    dynamo_kv_router_range: tuple[float, float]


def mooncake(folder: Path) -> Workload:
    path = folder / MOONCAKE
    if not path.is_file():
        raise SystemExit(f"compare_dynamo: no trace {path}; see kvcache-ai/Mooncake")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        requests = [json.loads(line) for line in lines]
    for number, request in enumerate(requests, 1):
        if missing := COLUMNS - request.keys():
            raise SystemExit(f"compare_dynamo: {path}:{number} lacks {', '.join(sorted(missing))}")
    if not requests:
        raise SystemExit(f"compare_dynamo: {path} holds no request")
    return Workload("mooncake", 512, requests)


def shared_prefixes(seed: int, groups: int = 16, prompts: int = 32) -> Workload:
    block, system, question, output = 128, 4096, 128, 256
    order = [group for group in range(groups) for _ in range(prompts)]
    random.Random(seed).shuffle(order)
    blocks = system // block
    requests = [
        {
            "timestamp": number,
            "input_length": system + question,
            "output_length": output,
            "hash_ids": [*range(group * blocks, (group + 1) * blocks), groups * blocks + number],
        }
        for number, group in enumerate(order)
    ]
    return Workload("published-16x32", block, requests, concurrency=64)


def chain(request: Request, block_tokens: int) -> Iterator[int]:
    """Keys of the full blocks of a prompt, each with all that stands before it."""
    key = 0
    for block in request["hash_ids"][: request["input_length"] // block_tokens]:
        key = hash((key, block))
        yield key


def counter(workload: Workload, workers: int, capacity_tokens: int | None) -> float:
    """Reuse under round robin; the least recently used block goes first, a leaf before its root."""
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(workers)]
    cached = total = 0
    for number, request in enumerate(workload.requests):
        cache, keys = caches[number % workers], list(chain(request, workload.block_tokens))
        hits = next((i for i, key in enumerate(keys) if key not in cache), len(keys))
        cached += hits * workload.block_tokens
        total += request["input_length"]
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while capacity_tokens and len(cache) * workload.block_tokens > capacity_tokens:
            cache.popitem(last=False)
    return cached / total


def load_dynamo() -> tuple[Any, Any]:
    """Dynamo's `run_trace_replay` and `MockEngineArgs`."""
    os.environ.setdefault("DYN_LOG", "error")  # else a line for every request
    try:
        replay = importlib.import_module("dynamo.replay")
        core = importlib.import_module("dynamo._core")
        found = version("ai-dynamo")
    except (ImportError, PackageNotFoundError) as error:
        raise SystemExit(
            f"compare_dynamo: {error}; in an environment of its own:"
            f" pip install ai-dynamo=={VERSION} ai-dynamo-runtime=={VERSION}"
        ) from None
    if found != VERSION:
        print(f"compare_dynamo: made for ai-dynamo {VERSION}, found {found}", file=sys.stderr)
    return replay.run_trace_replay, core.MockEngineArgs


def dynamo(workload: Workload, trace: Path, workers: int, capacity_tokens: int) -> Replay:
    """A function from the router's mode to the reuse of one replay."""
    run, engine_args = load_dynamo()
    engine = {
        "engine_type": "vllm",
        "block_size": workload.block_tokens,
        "num_gpu_blocks": capacity_tokens // workload.block_tokens,
    }

    def replay(router_mode: str) -> float:
        report = run(
            trace,
            extra_engine_args=engine_args.from_json(json.dumps(engine)),
            num_workers=workers,
            router_mode=router_mode,
            trace_block_size=workload.block_tokens,
            replay_concurrency=workload.concurrency,
        )
        if report["completed_requests"] != len(workload.requests):
            raise SystemExit(f"compare_dynamo: not all of {workload.name} was completed")
        return float(report["prefix_cache_reused_ratio"])

    return replay


def compare(workload: Workload, workers: int, capacity: int, repeats: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="compare-dynamo-") as folder:
        trace = Path(folder, "trace.jsonl")
        trace.write_text("".join(json.dumps(request) + "\n" for request in workload.requests))
        replay = dynamo(workload, trace, workers, capacity)
        routed = [replay("kv_router") for _ in range(repeats)]
        return Row(
            workload=workload.name,
            capacity_tokens=capacity,
            counter=round(counter(workload, workers, capacity), 4),
            dynamo_round_robin=round(replay("round_robin"), 4),
            dynamo_kv_router=round(sum(routed) / repeats, 4),
            dynamo_kv_router_range=(round(min(routed), 4), round(max(routed), 4)),
        )


def check(workload: Workload, capacities: Sequence[int]) -> None:
    """Dynamo stops with a riddle at a request that does not fit into a worker."""
    need = max(each["input_length"] + each["output_length"] for each in workload.requests)
    if (least := min(capacities)) < need + workload.block_tokens:
        raise SystemExit(
            f"compare_dynamo: --capacity {least} is too small for {workload.name},"
            f" whose longest request has {need} tokens"
        )


def show(row: Row) -> None:
    low, high = row.dynamo_kv_router_range
    print(
        f"{row.workload:16} {row.capacity_tokens:>11,} tokens a worker:"
        f" counter {row.counter:.4f}, dynamo round_robin {row.dynamo_round_robin:.4f},"
        f" kv_router {row.dynamo_kv_router:.4f} ({low:.4f} to {high:.4f})",
        flush=True,
    )


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", type=Path, help="folder of the traces")
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--workers", type=positive, default=8)
    parser.add_argument(
        "--capacity", type=positive, nargs="+", default=[2**30, 2**20, 2**18],
        help="tokens of cache a worker; the default's first is more than either workload has",
    )  # fmt: skip
    parser.add_argument("--repeats", type=positive, default=3, help="replays with the KV router")
    parser.add_argument("--seed", type=int, default=7, help="order of the shared-prefix prompts")
    return parser.parse_args(argv)


def main() -> None:
    options = arguments()
    load_dynamo()
    workloads = (mooncake(options.traces), shared_prefixes(options.seed))
    for workload in workloads:
        check(workload, options.capacity)
    if not options.out.parent.is_dir():
        raise SystemExit(f"compare_dynamo: no folder {options.out.parent}")
    rows = []
    for workload in workloads:
        for capacity in options.capacity:
            rows.append(compare(workload, options.workers, capacity, options.repeats))
            show(rows[-1])
    result = {
        "ai_dynamo": version("ai-dynamo"),
        "workers": options.workers,
        "seed": options.seed,
        "repeats": options.repeats,
        "rows": [asdict(row) for row in rows],
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
