import asyncio

import pytest

from bench.live.apis import Ask, Completions, Generate
from bench.live.client import Client
from tests.bench.live_target import FakeTarget


@pytest.fixture
def target():
    with FakeTarget() as target:
        yield target


def ask(target, ask=None, api=Completions, **options):
    async def run():
        async with Client(target.url, "fake", api(), **options) as client:
            return await client.ask(ask or Ask(b"1,2,3", 2, "key"))

    return asyncio.run(run())


def test_figures_of_an_answer(target):
    result = ask(target)
    assert not result.error
    assert result.answer.prompt_tokens == 3
    assert result.answer.cached_tokens == 3
    assert result.answer.output_tokens == 2
    assert result.answer.rank == -1
    assert result.sent <= result.first <= result.ended


def test_what_is_sent(target):
    ask(target)
    path, body, headers = target.requests[0]
    assert path == "/v1/completions"
    assert headers["x-smg-routing-key"] == "key"
    assert body == {
        "prompt": [1, 2, 3],
        "model": "fake",
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_without_a_key_there_is_no_header(target):
    ask(target, Ask(b"1", 1))
    assert "x-smg-routing-key" not in {name.lower() for name in target.requests[0][2]}


def test_a_rank_for_warming_up(target):
    ask(target, Ask(b"1", 1, rank=3))
    assert target.requests[0][1]["routed_dp_rank"] == 3


def test_generate_tells_the_rank(target):
    result = ask(target, api=Generate)
    assert (result.answer.rank, result.answer.cached_tokens) == (2, 5)
    path, body, headers = target.requests[0]
    assert path == "/generate"
    assert body["routing_key"] == "key"
    assert body["input_ids"] == [1, 2, 3]
    assert body["sampling_params"] == {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    assert "x-smg-routing-key" not in headers


@pytest.mark.parametrize(("report", "expected"), [(False, -1), (True, 0)])
@pytest.mark.parametrize("usage", [{}, {"prompt_tokens_details": {}}])
def test_no_word_of_cached_tokens(target, usage, report, expected):
    target.usage = usage
    result = ask(target, cache_report=report)
    assert not result.error
    assert result.answer.cached_tokens == expected


@pytest.mark.parametrize(
    ("fails", "error"),
    [
        ("status", "HTTP 500: out of order"),
        ("stream", "no memory left"),
        ("garbage", "DecodeError"),
        ("cut", "ClientPayloadError"),
    ],
)
def test_what_goes_wrong_is_in_the_result(target, fails, error):
    target.fails = fails
    assert error in ask(target).error


@pytest.mark.parametrize("usage", [None, {"completion_tokens": None}])
def test_an_answer_without_its_usage_is_a_failure(target, usage):
    target.usage = usage
    assert ask(target).error == "the answer ended without its usage"


def test_an_answer_without_a_token_is_a_failure(target):
    assert ask(target, Ask(b"1", 0)).error == "the answer ended without a token"


def test_nobody_there(target):
    target.url = "http://127.0.0.1:1"
    assert "Cannot connect" in ask(target).error
