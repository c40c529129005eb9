"""Puts our functions around SGLang's, once, and says what is not there to be wrapped."""

import functools
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any

logger = logging.getLogger("sglang_hook")

MARK = "_dp_sidecar_wrapped"

Function = Callable[..., Any]


class SeamMissing(Exception):
    """This SGLang has no such place to attach to; the message names it."""


class Untold(Exception):
    """Stands in the log for an error whose own text may hold a routing key or a prompt."""


def untold(error: Exception) -> tuple[type[Untold], Untold, TracebackType | None]:
    """What the log gets of an error (its `exc_info`): its type and where it was, not its text."""
    return Untold, Untold(type(error).__name__), error.__traceback__


def seam(owner: Any, name: str) -> Any:
    """What `owner` has under that name. Raises SeamMissing."""
    found = getattr(owner, name, None)
    if found is None:
        raise SeamMissing(f"{getattr(owner, '__name__', type(owner).__name__)} has no {name}")
    return found


def wrap(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Replace owner.name by make(original), once. Raises SeamMissing."""
    original = seam(owner, name)
    if getattr(original, MARK, False):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, MARK, True)
    setattr(owner, name, wrapper)


def wrap_if_there(
    owner: Any, name: str, make: Callable[[Function], Function], without: str
) -> None:
    """The same for what the rest can do without; `without` says what is then missing."""
    try:
        wrap(owner, name, make)
    except SeamMissing as error:
        logger.warning("dp_sidecar: WARNING: %s: %s", error, without)
