"""How the page is served: its headers, what is cached, that nothing in it points elsewhere."""

import http.client
import re
from pathlib import Path

import pytest

import sidecar.page
from sidecar.web import CSP, INDEX, TYPES
from tests.page.stub import Stub

FOLDER = Path(sidecar.page.__file__).parent
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)


def get(stub: Stub, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", stub.port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    answer.text = answer.read().decode()  # type: ignore[attr-defined]
    connection.close()
    return answer


def where(path: Path) -> str:
    return "/" if path.name == INDEX else f"/page/{path.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_served_as_it_is(stub: Stub, path: Path) -> None:
    answer = get(stub, where(path))
    assert answer.status == 200
    assert answer.text == path.read_text()  # type: ignore[attr-defined]
    assert answer.headers["Content-Type"] == f"{TYPES[path.suffix]}; charset=utf-8"
    assert answer.headers["Content-Security-Policy"] == CSP
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    tag = answer.headers["ETag"]
    again = get(stub, where(path), **{"If-None-Match": tag})
    assert (again.status, again.headers["ETag"]) == (304, tag)
    assert get(stub, where(path), **{"If-None-Match": '"other"'}).status == 200
    assert get(stub, where(path), "HEAD").status == 200
    assert get(stub, where(path), "POST").status == 405


@pytest.mark.parametrize("path", ["/page/", "/page/__init__.py", "/page/../web.py", "/index.html"])
def test_nothing_else_is_served(stub: Stub, path: str) -> None:
    assert get(stub, path).status == 404


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_points_elsewhere_or_is_taken_as_html(path: Path) -> None:
    text = path.read_text()
    urls = set(re.findall(r"\bhttps?://[^\s\"'`]+", text))
    assert urls <= {"http://www.w3.org/2000/svg"}  # a name space, never asked for
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in text
    assert not re.search(r"\son\w+=|style=|javascript:|url\(", text)
    assert len(text.splitlines()) <= 250


def test_the_policy_is_strict() -> None:
    assert CSP.startswith("default-src 'self';")
    assert "unsafe" not in CSP


def test_the_page_names_every_module() -> None:
    index = (FOLDER / INDEX).read_text()
    named = set(re.findall(r'page/([\w.]+)"', index))
    assert named == {path.name for path in FILES} - {INDEX}
