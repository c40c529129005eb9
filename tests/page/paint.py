"""How fast the status page is with 320 ranks: `python -m tests.page.paint [RANKS]`.

A real sidecar, a real Chromium, loopback, an empty cache each time. Prints milliseconds from the
start of the navigation: first paint, first contentful paint, and the first answer being shown.
"""

import statistics
import sys
import time

from tests.page.browser import Browser, browser
from tests.page.feed import Feed
from tests.processes import Sidecar, short_directory, sidecar_process

TIMES = 15
MARKS = "performance.getEntriesByType('paint').map((e) => [e.name, e.startTime])"
SHOWN = "performance.getEntriesByName('round')[0].startTime"


def measure(page: Browser, url: str) -> list[dict[str, float]]:
    """Milliseconds by name, for each of TIMES loads."""
    page.driver.execute_cdp_cmd("Network.setCacheDisabled", {"cacheDisabled": True})
    found = []
    for _ in range(TIMES):
        page.open(url)
        page.wait(f"({MARKS}).length === 2")
        found.append(dict(page.js(MARKS)) | {"first answer shown": page.js(SHOWN)})
    return found


def cost(sidecar: Sidecar) -> tuple[float, int]:
    """Median milliseconds and bytes of a GET /status."""
    spent, size = [], 0
    for _ in range(50):
        begun = time.perf_counter()
        size = len(sidecar.http("/status")[1])
        spent.append(1000 * (time.perf_counter() - begun))
    return statistics.median(spent), size


def main(ranks: int) -> None:
    """Measure and print."""
    with short_directory() as folder, sidecar_process(f"ipc://{folder}/q") as sidecar:
        url = f"http://127.0.0.1:{sidecar.port}/"
        with Feed(sidecar, ranks) as feed, browser() as page:
            feed.ask(200)
            feed.play(2)
            found = measure(page, url)
            strangers = [asked for asked in page.requests() if not asked.startswith(url)]
        print(f"{ranks} ranks, {TIMES} loads; milliseconds, median and worst")
        for name in found[0]:
            values = [one[name] for one in found]
            print(f"{name}: {statistics.median(values):.0f}, {max(values):.0f}")
        print(f"requests to elsewhere: {len(strangers)}")
        print("GET /status: {:.1f} ms, {} bytes".format(*cost(sidecar)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 320)
