"""Makes the picture of the page for people that README.md shows: `python -m tests.e2e.page_picture FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from sglang_ext.launch.demo_data import generate
from sglang_ext.launch.serve import REFERENCE_MODEL
from sglang_ext.serving import page
from tests.e2e.browser import Browser
from tests.e2e.server import Server

DEMONSTRATIONS = 189  # as in the demo
QUESTION = "the gate will not take my card"
WIDTH, HEIGHT = 1280, 1340


def main(file: Path) -> None:
    """Serve the embedded model, ask about the demo's pool, and write the PNG."""
    items, _ = generate(DEMONSTRATIONS, 1)
    with Server(REFERENCE_MODEL, max_total_tokens=16_000, served_model_name="reference") as server:
        server.put("library", items, block_size=10)
        server.put("opening-hours", [item for item in items if item["output"] == "opening hours"], block_size=4)
        for question in items[::9]:  # so that blocks have hits
            server.generate(question["input"], 1, pool="library")
        with Browser(width=WIDTH, height=HEIGHT) as window:
            window.open(server.url + page.PATH)
            window.wait_for("in the KV cache", "#facts")
            window.type("#question", QUESTION)
            window.click("#ask-form button.primary")
            window.wait_for("What it read", "#result")
            window.wait_for("0", "#map")
            window.run("document.querySelectorAll('.selection details')[1].open = true")
            window.run("document.activeElement.blur(); scrollTo(0, 0)")
            height = min(window.run("return document.documentElement.scrollHeight"), HEIGHT)
            window.devtools(
                "Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False
            )
            window.picture(file)
    few = Image.open(file).convert("RGB").quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(file, optimize=True)  # a third of the size


if __name__ == "__main__":
    main(Path(sys.argv[1]))
