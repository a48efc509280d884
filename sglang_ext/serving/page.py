"""The page for people, at /pools: pools and their blocks, and a question with what it read.

The page is one document without data, so it needs no key. Its script asks the server's own routes, with the key that is
typed into it, and shows what that key may read. Its parts lie in `assets/page`; the server puts them together, and its
Content-Security-Policy lets nothing run but these.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib.resources import files

import fastapi
from fastapi.responses import HTMLResponse

PATH = "/pools"

PARTS = {"style": ("pools.css",), "script": ("base.js", "pools.js", "ask.js")}
"""Element of the page that holds them -> files, in their order."""


@functools.cache
def document() -> str:
    """The page: HTML with its style and its script in it."""
    folder = files("sglang_ext") / "assets" / "page"
    html = (folder / "pools.html").read_text(encoding="utf-8")
    for tag, names in PARTS.items():
        inside = "".join((folder / name).read_text(encoding="utf-8") for name in names)
        html = html.replace(f"<{tag}></{tag}>", f"<{tag}>{inside}</{tag}>")
    return html


@functools.cache
def headers() -> dict[str, str]:
    """Headers of the page: it runs its own script, talks to its own server, and stands in no frame."""
    policy = [
        "default-src 'none'",
        f"script-src {_hash('script')}",
        f"style-src {_hash('style')}",
        "connect-src 'self'",
        "img-src data:",  # an empty icon, so that browsers ask for no other
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return {
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _hash(tag: str) -> str:
    """What stands in the page's one element of that name, as a source of a Content-Security-Policy."""
    inside = document().split(f"<{tag}>", 1)[1].split(f"</{tag}>", 1)[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode('utf-8')).digest()).decode('ascii')}'"


async def _page() -> fastapi.Response:
    return HTMLResponse(document(), headers=headers())


def add_page(app: fastapi.FastAPI) -> None:
    """The page on `app`; `serving.access` opens it to those without a key."""
    app.add_api_route(PATH, _page, methods=["GET"], include_in_schema=False)
