"""What a simulated rank costs in time and memory, read from the environment.

Each field is set by the variable `SIMULATED_<FIELD IN CAPITALS>`, for example
`SIMULATED_TIME_SCALE=0`. An unknown or invalid variable is an error.
"""

import os
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

PREFIX = "SIMULATED_"

NonNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The defaults resemble a mid-sized model on one current GPU a rank."""

    prefill_us_per_token: NonNegative = 25.0
    """Microseconds for each prompt token which the prefix cache does not hold."""
    step_overhead_ms: NonNegative = 3.0
    """Fixed cost of a prefill step, whatever its size."""
    decode_step_ms: NonNegative = 12.0
    """A whole decode step; every running request advances by one token."""
    chunked_prefill_tokens: Positive = 8192
    """Uncached prompt tokens in one prefill step; longer prompts take several."""
    max_running_requests: Positive = 64
    cache_tokens: Positive = 200_000
    """Capacity of the prefix cache of one rank."""
    default_output_tokens: Positive = 128
    """Length of an answer whose request sets no limit (there is no model to end it)."""
    journal: str = ""
    """File to which every rank appends a line `request id, tab, DP rank`; streamed answers of the
    OpenAI API do not say which rank they come from."""
    time_scale: NonNegative = 1.0
    """Multiplies every duration: 1 is real time, 0 does not sleep at all."""

    def prefill_seconds(self, tokens: int) -> float:
        milliseconds = self.step_overhead_ms + tokens * self.prefill_us_per_token / 1e3
        return milliseconds / 1e3 * self.time_scale

    def decode_seconds(self) -> float:
        return self.decode_step_ms / 1e3 * self.time_scale


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    given = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX)
    }
    try:
        return msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{PREFIX}* in the environment: {error}") from error
