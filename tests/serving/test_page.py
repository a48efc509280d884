"""The page for people as a document: what it holds, what may run in it, and who gets it. No server, no browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import fastapi
import pytest

from sglang_ext.attention.sparse import REPORT
from sglang_ext.config import CHOOSERS
from sglang_ext.serving import access, page
from sglang_ext.serving.access import CallerMiddleware, Keys
from sglang_ext.systems.registry import ours

USER, ADMIN = "user", "admin"
VOID = {"meta", "link", "input", "br", "img"}
FIELDS = {"input", "select", "textarea"}


class Document(HTMLParser):
    """A page's elements: (tag, attributes) in order, what stands in <style> and <script>; a wrong nesting fails."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"style": [], "script": []}
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute of {tag} stands twice"
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}>"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in self.inside:
            self.inside[self._open[-1]].append(data)

    def ids(self) -> list[str]:
        return [str(attributes["id"]) for _, attributes in self.elements if "id" in attributes]


@pytest.fixture(scope="module")
def document() -> Document:
    return Document(page.document())


def script(document: Document) -> str:
    return "".join(document.inside["script"])


def test_the_document_is_whole(document: Document) -> None:
    ids = document.ids()
    assert len(ids) == len(set(ids)) and {"pools", "map", "ask-form", "key-form"} <= set(ids)
    assert max(map(len, page.document().splitlines())) <= 120  # as in all our code
    assert page.document().startswith("<!doctype html>") and ("html", {"lang": "en"}) in document.elements
    named = set(re.findall(r"\$\(\"([\w-]+)\"\)", script(document)))
    assert len(named) > 15 and named <= set(ids)


def test_every_field_has_a_label(document: Document) -> None:
    fields = {a["id"] for tag, a in document.elements if tag in FIELDS and a.get("type") != "checkbox"}
    labelled = {a["for"] for tag, a in document.elements if tag == "label" and "for" in a}
    assert len(fields) >= 8 and labelled == fields
    boxes = [at for at, (_, a) in enumerate(document.elements) if a.get("type") == "checkbox"]
    assert boxes and all(document.elements[at - 1][0] == "label" for at in boxes)  # which stand in theirs
    titles = {a["aria-labelledby"] for _, a in document.elements if "aria-labelledby" in a}
    assert titles <= set(document.ids())


def test_keys_are_typed_unseen_and_kept_nowhere(document: Document) -> None:
    kinds = {a["id"]: a.get("type") for tag, a in document.elements if tag == "input"}
    assert kinds["pools-key"] == kinds["ask-key"] == "password"
    for kept in ("localStorage", "sessionStorage", "indexedDB", "document.cookie", "pushState", "location.hash"):
        assert kept not in script(document)


def test_nothing_comes_from_elsewhere(document: Document) -> None:
    html = page.document()
    assert not re.search(r"https?:|@import|url\(|//[\w-]+\.", html)
    for tag, attributes in document.elements:
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)
    assert [tag for tag, _ in document.elements if tag in ("script", "style")] == ["style", "script"]


def test_texts_of_others_stay_texts(document: Document) -> None:
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "srcdoc",
        "parseFromString",
    ):
        assert way not in script(document), way
    assert not [a for _, a in document.elements for name in a if name == "style" or name.startswith("on")]


def test_the_policy_lets_these_parts_run_and_no_others(document: Document) -> None:
    policy = dict(part.strip().split(" ", 1) for part in page.headers()["Content-Security-Policy"].split(";"))
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        digest = hashlib.sha256("".join(document.inside[tag]).encode()).digest()
        assert policy[directive] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'" and "unsafe" not in str(policy)
    assert page.headers()["X-Content-Type-Options"] == "nosniff"


def test_the_systems_with_a_report_are_those_that_it_knows(document: Document) -> None:
    found = re.search(r"const REPORTING = \[(.*?)\]", script(document))
    assert found is not None
    served = {name: system for name, system in ours().items() if not system.streams}
    assert set(re.findall(r'"([\w+]+)"', found[1])) == {
        name for name, system in served.items() if REPORT in system.make_policy().request_options
    }


def test_the_ways_to_choose_a_label_are_those_of_requests(document: Document) -> None:
    """One that a pool without labels does not have is not shown before a pool with some is."""
    offered = [a for tag, a in document.elements if tag == "option" and a.get("value") in CHOOSERS]
    assert [a["value"] for a in offered] == list(CHOOSERS)
    assert all("hidden" in a and "disabled" in a for a in offered)
    assert "custom.choose" in script(document)


# ---- colours ----


def colours(css: str) -> dict[str, tuple[float, ...]]:
    """Custom property -> red, green and blue, each 0 to 1."""
    found = re.findall(r"--([\w-]+): #([0-9a-f]{6});", css)
    return {name: tuple(int(value[at : at + 2], 16) / 255 for at in (0, 2, 4)) for name, value in found}


def luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance of sRGB (WCAG 2.1)."""
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_texts_can_be_read_in_light_and_in_dark(document: Document, mode: str) -> None:
    css = "".join(document.inside["style"])
    light, rest = css.split("@media (prefers-color-scheme: dark)", 1)
    chosen = colours(light if mode == "light" else rest.split("\n}", 1)[0])
    assert chosen.keys() == colours(light).keys() and len(chosen) > 10
    pairs = [(text, ground) for text in ("text", "quiet", "accent", "chosen", "bad", "good") for ground in ("card",)]
    pairs += [("text", "ground"), ("quiet", "ground"), ("text", "tint"), ("text", "bad-tint"), ("text", "field")]
    pairs += [("on-accent", "accent")]
    for text, ground in pairs:
        high, low = sorted((luminance(chosen[text]), luminance(chosen[ground])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (mode, text, ground)


# ---- who gets it ----


def answer(keys: Keys, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a request to an app with the page, guarded as a server is."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app = fastapi.FastAPI()

    async def pools() -> str:
        return "data"

    app.add_api_route("/v1/pools", auth_level(AuthLevel.ADMIN_OPTIONAL)(pools), methods=["GET"])
    page.add_page(app)
    app.add_middleware(CallerMiddleware, keys=keys, routes=app)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
        "scheme": "http",
        "query_string": b"", "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our hook around SGLang's rule, as the plugin puts it there."""
    from sglang_ext.compat import manager

    original = manager.decide_request_auth
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__

    def around(**request: Any) -> Any:
        return access.around_decide_request_auth(original, **request)

    monkeypatch.setattr(manager, "decide_request_auth", around)


@pytest.mark.parametrize("keys", [Keys(None, None), Keys(USER, None), Keys(None, ADMIN), Keys(USER, ADMIN)])
def test_the_page_needs_no_key_and_its_data_does(hooked: None, keys: Keys) -> None:
    guarded = 401 if keys.api or keys.admin else 200
    status, headers, body = answer(keys, "GET", page.PATH)
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert body.decode() == page.document() and headers["content-security-policy"] and headers["x-frame-options"]
    assert answer(keys, "GET", "/v1/pools")[0] == guarded
    assert answer(keys, "GET", "/v1/pools", host="x/pools?")[0] == guarded
    assert answer(keys, "GET", "/v1/pools", authorization=f"Bearer {keys.admin or keys.api}")[0] == 200


def test_nothing_beside_the_page_is_open(hooked: None) -> None:
    for method, path in (
        ("POST", "/pools"),
        ("GET", "/pools/"),
        ("GET", "/pools/x"),
        ("GET", "/poolside"),
        ("GET", "/"),
    ):
        assert answer(Keys(USER, ADMIN), method, path)[0] == 401, (method, path)
