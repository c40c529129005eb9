"""The status page: its files, shipped with the package and served as they are."""

import hashlib
from importlib import resources

from aiohttp import web

# No file of the page comes from elsewhere, and no other page may frame it.
CSP = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A browser asks again each time; an unchanged file costs a 304.
    "Cache-Control": "no-cache",
}
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"


class _File:
    """One file, read once: it answers without touching the disk."""

    def __init__(self, name: str, body: bytes) -> None:
        self.body = body
        self.type = TYPES[name[name.rindex(".") :]]
        self.tag = hashlib.sha256(body).hexdigest()[:16]

    async def serve(self, request: web.Request) -> web.Response:
        """Answer a GET or HEAD."""
        seen = request.if_none_match or ()
        if any(tag.value == self.tag for tag in seen):
            answer = web.Response(status=304, headers=HEADERS)
        else:
            answer = web.Response(
                body=self.body, content_type=self.type, charset="utf-8", headers=HEADERS
            )
        answer.etag = self.tag
        return answer


def add_page(app: web.Application) -> None:
    """Serve the page at `/` and its parts at `/page/`."""
    for entry in resources.files("sidecar.page").iterdir():
        if any(entry.name.endswith(suffix) for suffix in TYPES):
            file = _File(entry.name, entry.read_bytes())
            path = "/" if entry.name == INDEX else f"/page/{entry.name}"
            app.router.add_get(path, file.serve)
