"""FastAPI, the pipeline in an executor: the recipe of most tutorials.

The variant is the number of the executor's threads; 0: the executor that asyncio brings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.peers.setting import load_pipeline, setting


class Item(BaseModel):
    """The body."""

    text: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the pipeline."""
    threads = setting().variant
    app.state.executor = ThreadPoolExecutor(threads) if threads else None
    app.state.pipeline = load_pipeline()
    yield


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
async def predict(item: Item) -> list[dict[str, Any]]:
    """Run the pipeline for one text."""
    loop = asyncio.get_running_loop()
    answer: list[dict[str, Any]] = await loop.run_in_executor(
        app.state.executor, app.state.pipeline, item.text
    )
    return answer
