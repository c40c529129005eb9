"""A client of the OpenAI API: sessions that share a system prompt, each with its routing key."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import msgspec
from openai import AsyncOpenAI, OpenAIError

ROUTING_KEY_HEADER = "x-smg-routing-key"
_WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "be")


class Row(msgspec.Struct):
    """One request."""

    session: str
    turn: int
    request_id: str = ""
    error: str = ""
    begun: float = 0.0
    """Seconds on the client's monotonic clock."""
    ttft_ms: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Sessions:
    """`count` conversations, one request of each at a time, think time between the turns.

    system_words, turn_words: length of the shared system prompt and of a user's message; seed:
    fixes every text.
    """

    def __init__(
        self,
        base_url: str,
        count: int,
        system_words: int,
        turn_words: int,
        max_tokens: int,
        seed: int = 1,
    ) -> None:
        http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60)
        self.client = AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="none", max_retries=0, http_client=http
        )
        self.random = random.Random(seed)
        self.turn_words, self.max_tokens = turn_words, max_tokens
        system = {"role": "system", "content": self._text(system_words)}
        self.messages: dict[str, list[Any]] = {f"demo-session-{i}": [system] for i in range(count)}
        self.turn = 0

    async def run(self, turns: int, on_row: Callable[[Row], None], think: float = 0.1) -> list[Row]:
        """Run the next `turns` turns of every session; every request becomes a row."""
        first, self.turn = self.turn, self.turn + turns
        texts = {key: [self._text(self.turn_words) for _ in range(turns)] for key in self.messages}
        starts = {key: self.random.random() * think for key in self.messages}
        rows: list[Row] = []

        async def converse(key: str) -> None:
            await asyncio.sleep(starts[key])
            for offset, text in enumerate(texts[key]):
                rows.append(await self._ask(key, first + offset, text))
                on_row(rows[-1])
                await asyncio.sleep(think)

        await asyncio.gather(*(converse(key) for key in self.messages))
        return rows

    async def close(self) -> None:
        await self.client.close()

    async def _ask(self, key: str, turn: int, text: str) -> Row:
        messages = self.messages[key]
        messages.append({"role": "user", "content": text})
        row = Row(session=key, turn=turn, begun=time.monotonic())
        answer = ""
        try:
            stream = await self.client.chat.completions.create(
                model="simulated",
                messages=messages,
                max_tokens=self.max_tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={ROUTING_KEY_HEADER: key},
            )
            async for chunk in stream:
                row.request_id = chunk.id
                if chunk.choices and chunk.choices[0].delta.content:
                    row.ttft_ms = row.ttft_ms or (time.monotonic() - row.begun) * 1000
                    answer += chunk.choices[0].delta.content
                if chunk.usage:
                    details = chunk.usage.prompt_tokens_details
                    row.prompt_tokens = chunk.usage.prompt_tokens
                    row.cached_tokens = (details.cached_tokens or 0) if details else 0
            if not row.prompt_tokens:
                row.error = "the stream ended without usage"
        except OpenAIError as error:
            row.error = f"{type(error).__name__}: {error}"
        messages.append({"role": "assistant", "content": answer or "none"})
        return row

    def _text(self, words: int) -> str:
        return " ".join(self.random.choices(_WORDS, k=words))


def summarize(rows: list[Row], ranks: dict[str, int]) -> dict[str, Any]:
    """Figures of one arm. ranks: request id -> DP rank."""
    good = [row for row in rows if not row.error]
    places: dict[str, set[int]] = {}
    for row in good:
        places.setdefault(row.session, set()).add(ranks[row.request_id])
    prompt = sum(row.prompt_tokens for row in good)
    ttft = [row.ttft_ms for row in good]
    return {
        "requests": len(rows),
        "failed": len(rows) - len(good),
        "sessions": len({row.session for row in rows}),
        "max_ranks_per_session": max(map(len, places.values()), default=0),
        "cached_token_share": round(sum(row.cached_tokens for row in good) / max(1, prompt), 3),
        "ttft_ms": {
            "p50": round(median(ttft), 1) if ttft else None,
            "p99": round(quantiles(ttft, n=100)[98], 1) if len(ttft) > 1 else None,
        },
    }


def read_journal(path: Path) -> dict[str, int]:
    """request id -> DP rank, as the simulated schedulers wrote it."""
    with open(path, encoding="utf-8") as lines:
        rows = (line.rstrip("\n").split("\t") for line in lines)
        return {request_id: int(rank) for request_id, rank, *_ in rows}
