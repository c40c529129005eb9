"""Cross-check of our client: the same shared-prefix workload sent by `sglang.bench_serving`.

As read in SGLang 0.5.23 (`sglang/benchmark/serving.py` and `datasets/generated_shared_prefix.py`):
- `async_request_openai_completions` sends a row's `routing_key` as X-SMG-Routing-Key. The native
  backend, `async_request_sglang_generate`, sends the same header to /generate, which reads its key
  from the body only: the key is lost. So the backend here is `sglang-oai`.
- `sample_generated_shared_prefix_requests` is the only dataset that makes keys, one a group, of a
  uuid and the time: they differ from run to run, and so does every placement. `main` below puts the
  seed in the place of both. Its prompts are text of its own, not those of our client.
- It reads `choices[0]` of every chunk. The last chunks, with the usage or with what --cache-report
  asks for, have no choice: asking makes every request a failure. So cached tokens stay unknown here
  (SGLang's own /metrics knows them).
- Sessions with think times, sub-agents, traces and random prompts with keys cannot be expressed.
"""

import asyncio
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from bench.live.target import Facts, TargetError
from bench.outcome import Row
from bench.workloads import Workload
from bench.workloads.shared_prefix import SharedPrefix

_LOG_TAIL = 600


def flags(workload: Workload, facts: Facts, seed: int, file: Path) -> list[str]:
    """Arguments of `sglang.bench_serving`. Raises TargetError for what it cannot express."""
    if not isinstance(workload, SharedPrefix):
        raise TargetError(
            f"{workload.name}: sglang.bench_serving can send published-16x32, published-64x8 and "
            "gsp only; without --client bench_serving our own client sends anything"
        )
    p = workload.params
    given = {
        "backend": "sglang-oai",
        "base-url": facts.url,
        "model": facts.model,
        "dataset-name": "generated-shared-prefix",
        "gsp-num-groups": p.num_groups,
        "gsp-prompts-per-group": p.prompts_per_group,
        "gsp-system-prompt-len": p.system_prompt_len,
        "gsp-question-len": p.question_len,
        "gsp-output-len": p.output_len,
        "num-prompts": p.num_groups * p.prompts_per_group,
        "seed": seed,
        "warmup-requests": 0,
        "output-file": file,
        **({"max-concurrency": p.concurrency} if p.rate is None else {"request-rate": p.rate}),
    }
    switches = {"gsp-send-routing-key": p.send_routing_key, "gsp-ordered": p.ordered}
    switches |= {"output-details": True, "disable-tqdm": True}
    found = [f"--{name}={value}" for name, value in given.items()]
    return found + [f"--{name}" for name, on in switches.items() if on]


async def send(
    workload: Workload, facts: Facts, seed: int, seconds: float
) -> tuple[list[Row], float]:
    """Run it; rows and their seconds. Raises TargetError."""
    with TemporaryDirectory(prefix="dps-serving-") as folder:
        file = Path(folder) / "result.jsonl"
        arguments = flags(workload, facts, seed, file)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.live.serving", str(seed), *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), seconds)
        except asyncio.TimeoutError:
            raise TargetError(f"sglang.bench_serving: not done within {seconds:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode or not file.exists():
            tail = output.decode(errors="replace")[-_LOG_TAIL:]
            raise TargetError(f"sglang.bench_serving ended with {process.returncode}: {tail}")
        return read_rows(json.loads(file.read_text(encoding="utf-8").splitlines()[-1]))


def read_rows(result: dict[str, Any]) -> tuple[list[Row], float]:
    """Rows of its result line; it tells neither session nor time of sending."""
    columns = ("input_lens", "output_lens", "ttfts", "itls", "errors")
    missing = [name for name in columns if name not in result]
    if missing:
        raise TargetError(f"sglang.bench_serving: its result has no {', '.join(missing)}")
    rows = []
    for number, values in enumerate(zip(*(result[name] for name in columns), strict=True)):
        prompt, output, first, gaps, error = values
        rows.append(
            Row(
                id=number,
                session=-1,
                turn=0,
                at=0.0,
                rank=-1,
                prompt_tokens=prompt,
                cached_tokens=-1,
                output_tokens=output,
                ttft_ms=first * 1e3,
                e2e_ms=(first + sum(gaps)) * 1e3,
                error=str(error)[-200:] if error else "",
            )
        )
    return rows, float(result["duration"])


def main() -> None:
    """`python -m bench.live.serving SEED FLAGS`: bench_serving whose keys depend on SEED alone."""
    from sglang.benchmark import serving
    from sglang.benchmark.datasets import generated_shared_prefix as dataset

    name = f"key-set-{sys.argv.pop(1)}"
    fixed_id = SimpleNamespace(hex=name.ljust(8))
    fixed_time = SimpleNamespace(strftime=lambda form: "fixed")
    dataset.uuid = SimpleNamespace(uuid4=lambda: fixed_id)
    dataset.datetime = SimpleNamespace(now=lambda: fixed_time)
    serving.cli_main()


if __name__ == "__main__":
    main()
