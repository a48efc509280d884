"""The page for people, of a server with two keys: what it shows to whom, in a real browser where one is installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from sglang_ext.serving import page
from tests.e2e.browser import CONTROL, ENTER, TAB, Browser, needs_browser
from tests.e2e.server import Server, model, until
from tests.oracle import models

USER, ADMIN = "key-of-users", "key-of-the-operator"
QUESTION = "how do i activate my card?"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
LONG = "long " * 400
DEMOS = models.demonstrations(24)
CLOSED = [{**item, "input": f"secret {item['input']} {HOSTILE}"} for item in DEMOS[:-1]]
CLOSED += [{"input": LONG, "output": f"{HOSTILE} label"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(
        model(max_position_embeddings=8192), max_total_tokens=20_000, api_key=USER, admin_api_key=ADMIN
    ) as running:
        for name, items, readable in (("open", DEMOS, True), ("closed", CLOSED, False)):
            body = {"demonstrations": items, "block_size": 4, "readable": readable}
            running.json("PUT", f"/v1/pools/{name}", json=body, headers={"Authorization": f"Bearer {ADMIN}"})
        yield running
        assert running.faults() == []


@pytest.fixture
def browser(server: Server) -> Iterator[Browser]:
    """A window with the page in it, and no key."""
    with Browser() as window:
        window.open(server.url + page.PATH)
        window.wait_for("Type it in above", "#notice")
        yield window
        assert [words for words in window.complaints() if "Failed to load resource" not in words] == []
        assert window.run("return document.title") != "taken"


def with_keys(window: Browser, pools: str, asks: str) -> None:
    """Type keys into the page; an empty text leaves a field empty."""
    window.run("document.getElementById('keys').open = true")
    for selector, key in (("#pools-key", pools), ("#ask-key", asks)):
        window.type(selector, key)
    window.click("#key-form button")


def asked(window: Browser, pool: str, question: str = QUESTION) -> str:
    """What the page shows of an answer, or of an error."""
    window.type("#pool-name", pool)
    window.type("#question", question)
    window.click("#ask-form button.primary")
    until(lambda: not window.run("return document.querySelector('#ask-form button.primary').disabled"))
    return window.text("#result")


# ---- without a browser ----


def test_the_page_is_for_everybody_and_its_data_are_not(server: Server) -> None:
    answer = requests.get(server.url + page.PATH, timeout=60)
    assert answer.status_code == 200 and answer.text == page.document()
    assert {name: answer.headers[name] for name in page.headers()} == page.headers()
    for name in ("closed", "open", "secret", USER, ADMIN):
        assert f"{name} how" not in answer.text and f'"{name}"' not in answer.text
    for path in ("/v1/pools", "/v1/pools/open", "/server_info", "/pools/", "/pools/x"):
        assert requests.get(server.url + path, timeout=60).status_code == 401, path
        assert requests.get(server.url + path, headers={"Host": "x/pools?"}, timeout=60).status_code == 401, path
    assert requests.post(server.url + page.PATH, timeout=60).status_code == 401


# ---- what whose key shows ----


@needs_browser
def test_without_a_key_there_is_nothing_to_see(browser: Browser) -> None:
    assert "secret" not in browser.text() and "closed" not in browser.text()
    assert browser.run("return document.getElementById('pool').hidden")
    with_keys(browser, "wrong", "")
    browser.wait_for("The key does not show pools", "#notice")
    assert "(401)" in asked(browser, "open")


@needs_browser
def test_a_users_key_shows_what_it_may_read(browser: Browser) -> None:
    with_keys(browser, "", USER)
    browser.wait_for("The key does not show pools", "#notice")
    shown = asked(browser, "open")
    assert "block 0, sink" in shown and "score" in shown and "Probabilities of the labels" in shown
    browser.click("#result .selection summary")
    found = browser.run("return [...document.querySelectorAll('#result td:first-child')].map(e => e.textContent)")
    assert found and set(found) <= {item["input"] for item in DEMOS}
    shown = asked(browser, "closed")
    assert "may not read this pool" in shown and "blocks 0, " in shown and "score " not in shown
    assert "secret" not in browser.run("return document.body.textContent")


@needs_browser
def test_both_keys_show_pools_and_what_answers_read(server: Server, browser: Browser) -> None:
    with_keys(browser, ADMIN, USER)
    browser.wait_for("closed", "#pools")
    assert browser.run("return document.getElementById('notice').hidden")
    assert "version\n1" in browser.wait_for("in the KV cache", "#facts")
    listed = browser.run("return [...document.querySelectorAll('#map .tile')].map(e => e.title)")
    blocks = server.json("GET", "/v1/pools/closed", headers={"Authorization": f"Bearer {ADMIN}"})["blocks"]
    assert len(listed) == len(blocks) == 6
    assert [f"{block['tokens']:,} tokens" in text for block, text in zip(blocks, listed, strict=True)] == [True] * 6
    shown = asked(browser, "closed")
    assert "block 0, sink" in shown and "may not read" not in shown and "has changed" not in shown
    used = browser.run("return state.used")
    scores = browser.run("return [...document.querySelectorAll('.selection summary')].map(e => e.textContent)")
    found = server.json(
        "POST", "/v1/pools/closed/select", json={"text": QUESTION}, headers={"Authorization": f"Bearer {ADMIN}"}
    )
    assert used["blocks"] == found["blocks"]
    for text, entry in zip(scores, found["selection"], strict=True):
        block, score = re.findall(r"block (\d+).*?score (-?[\d.]+)", text)[0]
        assert int(block) == entry["block"] and float(score) == pytest.approx(entry["score"], rel=1e-3, abs=1e-3)
    browser.wait_for("read by the answer", "#legend")
    chosen = "return [...document.querySelectorAll('.tile.chosen')].map(e => Number(e.textContent))"
    assert until(lambda: browser.run(chosen)) == sorted(used["blocks"])
    probs = browser.run("return document.querySelectorAll('#result .bars .bar').length")
    assert probs == min(6, len(used["label_probs"]))
    kept = "return [location.href, document.cookie, localStorage.length, sessionStorage.length]"
    assert browser.run(kept) == [server.url + page.PATH, "", 0, 0]


@needs_browser
def test_the_most_likely_label_is_asked_for_where_a_pool_has_labels(browser: Browser) -> None:
    def offered() -> bool:
        shown: bool = browser.run("const o = document.getElementById('likely'); return !o.hidden && !o.disabled")
        return shown

    def chosen() -> str:
        value: str = browser.run("return document.getElementById('constrain').value")
        return value

    assert not offered()
    with_keys(browser, ADMIN, USER)
    browser.wait_for("closed", "#pools")
    assert offered() and chosen() == "labels"
    browser.type("#constrain", "the most", clear=False)
    assert chosen() == "likely"
    for name in ("open", "open@1"):
        assert "Probabilities of the labels" in asked(browser, name)
        used = browser.run("return state.used")
        assert browser.text("#answer") == max(used["label_probs"], key=used["label_probs"].get)
    likeliest = browser.text("#answer")
    browser.click("#probs")
    shown = asked(browser, "open")  # the server searches for the label then, and scores no other
    assert "label found in 1 pass ·" in shown and "Probabilities of the labels" not in shown
    assert browser.text("#answer") == likeliest
    assert chosen() == "likely"
    browser.type("#pool-name", "nobody")
    browser.press(TAB)
    assert not offered() and chosen() == "labels"


@needs_browser
def test_texts_of_others_are_shown_as_they_are(browser: Browser) -> None:
    with_keys(browser, ADMIN, USER)
    browser.wait_for("closed", "#pools")
    for number in range(6):
        browser.click(f'[data-key="tile-{number}"]')
        browser.wait_for(f"Block {number}", "#block")
        until(lambda: browser.run("return document.querySelectorAll('#block td').length") == 8)
        assert "<img src=x" in browser.text("#block")
        for button in browser.run("return [...document.querySelectorAll('#block td button')].map(e => e.textContent)"):
            assert button == f"show all {len(LONG):,} characters"
            browser.click("#block td button")
            assert LONG in browser.run("return document.getElementById('block').textContent")
    assert browser.run("return document.images.length + document.scripts.length") == 1  # its own script


@needs_browser
def test_an_error_of_the_server_is_shown(browser: Browser) -> None:
    with_keys(browser, ADMIN, USER)
    browser.wait_for("closed", "#pools")
    assert "unknown pool 'nobody'" in asked(browser, "nobody") and "(404)" in browser.text("#result [role=alert]")
    browser.type("#longest", "100000")
    assert "context" in asked(browser, "open") and "(400)" in browser.text("#result [role=alert]")


# ---- how it is used and looks ----


@needs_browser
def test_the_keyboard_is_enough(browser: Browser) -> None:
    browser.press(TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    browser.press(TAB, TAB, *ADMIN, TAB, *USER, ENTER)  # the keys' panel is open
    browser.wait_for("open", "#pools")
    browser.wait_for_element('[data-key="tile-2"]')
    browser.run("document.querySelector('[data-key=\"tile-0\"]').focus()")
    browser.press("\ue014", "\ue014", ENTER)  # to the right, twice
    browser.wait_for("Block 2", "#block")
    assert browser.run("return document.activeElement.dataset.key") == "tile-2"
    browser.press(TAB)
    assert browser.run("return document.activeElement.tagName") == "SUMMARY"  # the tiles are one stop
    browser.type("#question", QUESTION + CONTROL + ENTER)
    browser.wait_for("What it read", "#result")


def pool(**more: Any) -> dict[str, Any]:
    """A line of GET /v1/pools on a pool that has no version yet."""
    return {"name": "new", "version": 0, "status": "encoding", "error": None, "setup_seconds": 0.0, **more}


@needs_browser
def test_states_of_pools(browser: Browser) -> None:
    """An encoding under way, one that waits, one that failed, and no pools, as the routes tell them."""
    progress = {"blocks": 40, "tokens": 8000, "blocks_done": 10, "tokens_done": 2000}
    lines = [pool(phase="encoding", progress=progress), pool(name="next", phase="waiting")]
    lines += [pool(name="bad", status="failed", error="no room for 9 tokens")]
    browser.run(f"showPools({json.dumps(lines)}); showPool({json.dumps(lines[0])})")
    shown = browser.text("#pools")
    assert "10 of 40 blocks encoded" in shown and "waiting" in shown and "failed" in shown
    assert browser.run("return document.querySelector('#pool-state progress').position") == 0.25
    assert "wait for its first version" in browser.text("#pool")
    browser.run(f"state.name = 'bad'; showPool({json.dumps(lines[2])})")
    assert "no room for 9 tokens" in browser.text("#pool [role=alert]")
    browser.run("showPools([])")
    assert "There are no pools yet" in browser.text("#pools") and "curl -X PUT" in browser.text("#pools")
    assert browser.run("return document.getElementById('pool').hidden")


@needs_browser
def test_what_a_report_measured(browser: Browser) -> None:
    """Reports as `attention.sparse` writes them: of decoding steps, by layer, and of steps that were dense."""
    step = {"exact": [0.1, 0.3], "kept": [0.5, 0.5], "recovered": [0.9, 1.0], "recovered_least": [0.8, 0.9]}
    shown = "return attention({}).textContent"
    told = browser.run(shown.format(json.dumps([{"dense": "the prompt"}, step, step])))
    assert "95.0% recovered, 20.0% of the tokens" in told and "2 generated tokens" in told
    assert "dense, for the row is short" in browser.run(shown.format(json.dumps([{"dense": "the row is short"}])))
    assert browser.run("return attention(undefined)") is None


@needs_browser
def test_a_click_meets_what_was_there(browser: Browser) -> None:
    """A look at the pools that finds nothing new leaves each element where it is; one that does, the others."""
    lines = [pool(name=name, phase="waiting") for name in ("a", "b")]
    browser.run(f"showPools({json.dumps(lines)}); window.before = [...document.querySelectorAll('#pools li')]")
    lines[1]["phase"] = "preparing"
    browser.run(f"showPools({json.dumps(lines)})")
    same = "return [...document.querySelectorAll('#pools li')].map((each, at) => each === window.before[at])"
    assert browser.run(same) == [True, False]


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_small_windows_in_light_and_in_dark(server: Server, dark: bool) -> None:
    with Browser(dark=dark, width=500) as window:
        window.open(server.url + page.PATH)
        with_keys(window, ADMIN, USER)
        window.wait_for("closed", "#pools")
        asked(window, "closed")
        assert window.run("return document.documentElement.scrollWidth <= innerWidth")
        ground = window.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 3 * 128) == dark
