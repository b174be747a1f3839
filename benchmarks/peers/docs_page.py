"""The web server of the transformers documentation, page "pipeline_webserver", in its two versions.

Repaired only where it does not start, or never answers: a lifespan in place of the startup event,
the pipeline's name, and the first text of a batch, which the page forgets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers.pipelines.base import Pipeline

from benchmarks.peers.setting import load_pipeline, run_batch, setting

Queue = asyncio.Queue[tuple[str, asyncio.Queue[Any]]]


async def homepage(request: Request) -> JSONResponse:
    """Queue the text and wait for its answer."""
    text = (await request.body()).decode()
    response: asyncio.Queue[Any] = asyncio.Queue()
    await request.app.state.queue.put((text, response))
    return JSONResponse(await response.get())


async def one_text_loop(queue: Queue, pipeline: Pipeline) -> None:
    """Run the pipeline for one text at a time, on the event loop."""
    while True:
        text, response = await queue.get()
        await response.put(pipeline(text))


async def batch_loop(queue: Queue, pipeline: Pipeline) -> None:
    """Collect texts until none comes for a while; run the pipeline for all, in a thread."""
    chosen = setting()
    while True:
        batch = [await queue.get()]
        while len(batch) < chosen.batch:
            try:
                batch.append(await asyncio.wait_for(queue.get(), chosen.wait_ms / 1000))
            except TimeoutError:
                break
        texts = [text for text, _ in batch]
        answers = await asyncio.to_thread(run_batch, pipeline, texts)
        for (_, response), answer in zip(batch, answers, strict=True):
            await response.put(answer)


def _app(loop: Callable[[Queue, Pipeline], Awaitable[None]]) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.queue = asyncio.Queue()
        task = asyncio.ensure_future(loop(app.state.queue, load_pipeline()))
        yield
        task.cancel()

    return Starlette(routes=[Route("/", homepage, methods=["POST"])], lifespan=lifespan)


def one_by_one() -> Starlette:
    """Return the page's server."""
    return _app(one_text_loop)


def batched() -> Starlette:
    """Return the page's server with dynamic batching."""
    return _app(batch_loop)
