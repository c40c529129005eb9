"""Slow code beside the loop: what it gives, and that nobody waits for it at the end."""

import asyncio
import sys

import pytest

from sidecar.aside import aside
from tests.processes import running


def test_what_it_returns_and_raises() -> None:
    async def test() -> None:
        assert await aside(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await aside(lambda: 1 // 0)

    asyncio.run(test())


NEVER = """
import asyncio, threading
from sidecar.aside import aside

async def main():
    waiting = asyncio.ensure_future(aside(threading.Event().wait))
    await asyncio.sleep(0)
    print("left")

asyncio.run(main())
"""


def test_the_end_does_not_wait_for_it() -> None:
    with running([sys.executable, "-c", NEVER]) as process:
        assert process.wait() == 0
        assert process.log() == "left\n"
