"""FastAPI, `model.generate` in an executor: the recipe of most tutorials for text generation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch
import transformers
from fastapi import FastAPI
from pydantic import BaseModel


class Item(BaseModel):
    """The body."""

    prompt: str
    max_tokens: int
    model: str | None = None


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the model."""
    folder = os.environ["MODEL"]
    app.state.executor = ThreadPoolExecutor(1)
    app.state.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    app.state.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    yield


app = FastAPI(lifespan=lifespan)


def generate(item: Item) -> tuple[str, int]:
    """Return the text and how many tokens it has."""
    inputs = app.state.tokenizer(item.prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        output = app.state.model.generate(**inputs, max_new_tokens=item.max_tokens, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    return app.state.tokenizer.decode(new, skip_special_tokens=True), len(new)


@app.post("/v1/completions")
async def complete(item: Item) -> dict[str, Any]:
    """Go on with one text."""
    loop = asyncio.get_running_loop()
    text, count = await loop.run_in_executor(app.state.executor, generate, item)
    return {"choices": [{"text": text}], "usage": {"completion_tokens": count}}
