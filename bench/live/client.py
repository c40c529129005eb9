"""Asks a server over HTTP and times the answer."""

import asyncio
import time
from types import TracebackType

import aiohttp
import msgspec

from bench.live.apis import Answer, Api, Ask
from bench.live.tokens import Tokens
from bench.workloads.base import Call

CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 600.0


class Result(msgspec.Struct):
    """One request; times in real seconds of `clock`."""

    sent: float
    first: float = 0.0
    """When its first token came."""
    ended: float = 0.0
    answer: Answer = msgspec.field(default_factory=Answer)

    @property
    def error(self) -> str:
        return self.answer.error


clock = time.perf_counter


class Client:
    """Connections to one server; an asynchronous context manager.

    cache_report: the server tells cached tokens, so that none told are none; else they are unknown.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api: Api,
        cache_report: bool = False,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self.url = url + api.path
        self.model = model
        self.api = api
        self.cache_report = cache_report
        self.timeout = aiohttp.ClientTimeout(total=request_seconds, sock_connect=CONNECT_SECONDS)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Client":
        # The workload bounds how many run at a time, not the client.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self.timeout)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def call(self, call: Call, tokens: Tokens) -> Result:
        """Send a call of a workload. Whatever goes wrong is in the result."""
        prompt = tokens.prompt(call.pages, call.prompt_tokens)
        return await self.ask(Ask(prompt, call.output_tokens, call.key))

    async def ask(self, ask: Ask) -> Result:
        """Send one request. Whatever goes wrong is in the result."""
        if self._session is None:
            raise RuntimeError("the client is closed")
        body = self.api.body(self.model, ask)
        headers = {"Content-Type": "application/json", **self.api.headers(ask)}
        result = Result(sent=clock())
        try:
            async with self._session.post(self.url, data=body, headers=headers) as response:
                if response.status == 200:
                    await self._read(response, result)
                else:
                    text = (await response.text())[:200]
                    result.answer.error = f"HTTP {response.status}: {text}"
        except asyncio.TimeoutError:
            result.answer.error = f"no whole answer within {self.timeout.total:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # ValueError: JSON without sense, or a line longer than aiohttp takes.
            result.answer.error = f"{type(error).__name__}: {error}"
        result.ended = clock()
        self._check(result)
        return result

    async def _read(self, response: aiohttp.ClientResponse, result: Result) -> None:
        """Server-sent events, a line each."""
        async for line in response.content:
            data = line.strip()
            if not data.startswith(b"data:") or data == b"data: [DONE]":
                continue
            if self.api.read(data[5:], result.answer) and not result.first:
                result.first = clock()

    def _check(self, result: Result) -> None:
        """An answer without its figures is a failure; unknown cached tokens are not."""
        answer = result.answer
        if answer.error:
            return
        if not result.first:
            answer.error = "the answer ended without a token"
        elif answer.prompt_tokens < 0 or answer.output_tokens < 0:
            answer.error = "the answer ended without its usage"
        elif answer.cached_tokens < 0 and self.cache_report:
            answer.cached_tokens = 0
