"""/ready: whether a server is to be sent requests: it has started, its pools are there, and it is not ending.

/health says less: that the server answers. A router that goes by it sends requests to a server that still encodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import fastapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from sglang_ext import compat
from sglang_ext.names import TokenizerManager

if TYPE_CHECKING:
    from sglang_ext.serving.pools import PoolService

PATH = "/ready"


def not_ready(manager: TokenizerManager, services: Iterable[PoolService]) -> str | None:
    """Why a server is not to be sent requests, in words that name no pool and no tenant; None: it is ready.

    Args:
        services: whose pools it waits for.
    """
    if compat.is_told_to_end(manager):
        return "the server is told to end"
    if not compat.takes_requests(manager):
        return "the server starts, is paused, or has failed its last health check"
    reasons = (each.folder.waits_for() for each in services)
    return next((why for why in reasons if why is not None), None)


def add_route(app: fastapi.FastAPI, manager: TokenizerManager, service: PoolService) -> None:
    """GET /ready on `app`, in place of SGLang's own where it has one; `serving.access` opens it to all.

    Args:
        service: the pools of any tenant. The server waits for those of all tenants that there are now: one that comes
            later, by SIGHUP, must not take a server that is ready away from the others.
    """
    awaited = list(service.shared.services.values())

    async def ready() -> fastapi.Response:
        why = not_ready(manager, awaited)
        pools = [pool for each in service.shared.services.values() for pool in each.pools.values()]
        unserved = sum(pool.current is None and bool(pool.error or pool.failure) for pool in pools)
        told = {"ready": why is None, **({"why": why} if why else {}), "pools_not_served": unserved}
        return JSONResponse(told, status_code=503 if why else 200)

    theirs = [each for each in app.router.routes if isinstance(each, APIRoute) and each.path == PATH]
    for route in theirs:
        app.router.routes.remove(route)
    app.add_api_route(PATH, ready, methods=["GET"], include_in_schema=False)
