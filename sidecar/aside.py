"""Slow code of others beside the event loop, in threads that nobody waits for at the end.

A thread of the loop's own pool would keep a process alive whose policy never comes back from its
import, and six of them would keep every later reload waiting.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(call: Callable[[], T]) -> T:
    """What `call` returns or raises, run in a thread of its own."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: Exception | None) -> None:
        if done.done():
            return  # nobody waits any more
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, problem = None, None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(tell, result, problem)

    threading.Thread(target=work, name="aside", daemon=True).start()
    return await done
