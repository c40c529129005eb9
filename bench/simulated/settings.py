"""What a simulated rank costs in time and memory, read from the environment.

Each field is set by the variable `SIMULATED_<FIELD IN CAPITALS>`, for example
`SIMULATED_TIME_SCALE=0`; so are those of `bench.model.steps.StepParams`, such as `SIMULATED_TABLE`
or `SIMULATED_DECODE_SCALE`. An unknown or invalid variable is an error.
"""

import os
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from bench.model.request import Positive, RankSpec
from bench.model.steps import StepParams, StepTimes

PREFIX = "SIMULATED_"

NonNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]

_RANK = RankSpec()


class Settings(StepParams, frozen=True, forbid_unknown_fields=True):
    """The defaults are the model's: virtual and real time simulate the same server."""

    page_tokens: Positive = _RANK.page_tokens
    chunked_prefill_tokens: Positive = _RANK.chunk_tokens
    """Uncached prompt tokens in one prefill step of a rank; longer prompts take several. Plain DP
    in SGLang does not divide its chunked_prefill_size among the ranks: set it there."""
    max_running_requests: Positive = _RANK.max_running
    cache_tokens: Positive = _RANK.cache_tokens
    """KV cache of one rank, running requests included."""
    default_output_tokens: Positive = 128
    """Length of an answer whose request sets no limit (there is no model to end it)."""
    journal: str = ""
    """File to which every rank appends a line `request id, tab, DP rank, tab, cached tokens` when
    it begins with a prompt; streamed answers of the OpenAI API do not say which rank they come
    from."""
    time_scale: NonNegative = 1.0
    """Multiplies every duration: 1 is real time, 0 does not sleep at all."""
    barrier: str = ""
    """Where the ranks meet under DP attention; `bench.simulated.server` sets it."""

    def rank_spec(self) -> RankSpec:
        return RankSpec(
            cache_tokens=self.cache_tokens,
            page_tokens=self.page_tokens,
            chunk_tokens=self.chunked_prefill_tokens,
            max_running=self.max_running_requests,
        )


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Raises ValueError for what is wrong, an unknown table included."""
    given = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX)
    }
    try:
        settings = msgspec.convert(given, Settings, strict=False)
        StepTimes(settings)
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"{PREFIX}* in the environment: {error}") from error
    return settings
