"""What only the operator may do."""

from __future__ import annotations

import asyncio

from pydantic import Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from api import http
from api.formats import Strict
from errors import Rejected
from service import service

RELOAD = "/admin/reload"


class Reload(Strict):
    """Which model is to serve; nothing: that of the settings, anew."""

    model_id: str | None = Field(None, min_length=1, max_length=1000)
    revision: str | None = Field(None, min_length=1, max_length=200)


async def reload(request: HTTPRequest) -> Response:
    """Load a model in place of the one that serves, and answer when it does.

    Raises:
        RequestError: Of any kind; `on_request_error` answers it.
    """
    behind = service(request)
    if behind.settings.admin_key is None:
        raise HTTPException(404, "there is no ADMIN_KEY")
    http.authorize(request, behind.settings.admin_key)
    deadline = asyncio.get_running_loop().time() + behind.settings.request_timeout_s
    body = await http.read_body(request, behind.settings.max_body_bytes, deadline)
    try:
        wanted = Reload.model_validate_json(body or b"{}")
    except ValidationError:
        raise Rejected('send {"model_id": "…", "revision": "…"}, or less, or nothing') from None
    return JSONResponse(await behind.reloader.reload(wanted.model_id, wanted.revision))
