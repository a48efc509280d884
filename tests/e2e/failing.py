"""What `PYTHONPATH=... python` of a test server imports first: a scheduler that fails upon a request with `RID`.

`folder()` has a `sitecustomize.py` that wraps SGLang's scheduler once it is imported; nothing of it is in the product.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from tests.e2e.patching import sitecustomize

RID = "fail-now"
AT_START = "SGLANG_EXT_TEST_FAILS"  # environment: the scheduler fails before it is there
REASON = "a test wants this scheduler to fail"

_CODE = sitecustomize(
    "sglang.srt.managers.scheduler",
    f"""
    original = module.Scheduler.handle_generate_request

    def handle(self, request, *args, **kwargs):
        if request.rid == {RID!r}:
            raise RuntimeError({REASON!r})
        return original(self, request, *args, **kwargs)

    def fail(self, *args, **kwargs):
        raise RuntimeError({REASON!r})

    module.Scheduler.handle_generate_request = handle
    if os.environ.get({AT_START!r}):
        module.Scheduler.__init__ = fail
    """,
)


@cache
def folder() -> Path:
    """A folder for the PYTHONPATH of a server."""
    made = Path(tempfile.mkdtemp(prefix="sglang-ext-failing-"))
    (made / "sitecustomize.py").write_text(_CODE, encoding="utf-8")
    return made
