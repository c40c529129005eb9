"""One browser for all tests of the page, and a stand-in for the sidecar for each."""

from collections.abc import Iterator

import pytest

from tests.page.browser import CHROMIUM, DRIVER, Browser, browser
from tests.page.stub import Stub, instance, status


@pytest.fixture(scope="session")
def shared_browser() -> Iterator[Browser]:
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs chromium and chromium-driver (.ci/debian-packages)")
    with browser() as one:
        yield one


@pytest.fixture
def page(shared_browser: Browser) -> Browser:
    """The browser as a new user has it: 1280x800, light, nothing stored."""
    shared_browser.size(1280, 800)
    shared_browser.prefer("light")
    return shared_browser


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as one:
        one.status = status(instance("gpu-1:30000", 8))
        yield one
