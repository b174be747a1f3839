"""Text generation: onequeue against `transformers serve`, against FastAPI, and against no HTTP.

    python -m benchmarks.generation

A random Llama of 40 million parameters, 16 clients in a closed loop, 64 prompts of 5 to 120 tokens
whose answers have 16 to 96. All servers decode greedily in float32 with the same cache; the engine
without HTTP is driven by a loop that adds all prompts at once. Servers are measured in turns; the
ratios are those of the medians. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.contestants import PEERS_PYTHON, PORT, Contestant, ours, running
from benchmarks.models import FOLDER, SEED, sentences
from tests.tiny_causal import saved_causal

CLIENTS = 16
PROMPTS = 64
ROUNDS = 3
PAGE_TOKENS, CACHE_TOKENS, STEP_TOKENS = 32, 16_384, 512
PATH = "/v1/completions"


@dataclass(frozen=True)
class Ask:
    """One prompt, and how many tokens are to follow it."""

    prompt: str
    most: int

    def body(self, model: str) -> bytes:
        """Return the request in the OpenAI wire format."""
        about = {"model": model, "prompt": self.prompt, "max_tokens": self.most}
        return json.dumps({**about, "temperature": 0}).encode()


def asks() -> list[Ask]:
    """Return the prompts: sentences cut at random."""
    rng = random.Random(SEED)
    texts = rng.sample(sentences(), PROMPTS)
    return [Ask((text * 3)[: rng.randint(10, 240)], rng.randint(16, 96)) for text in texts]


def folder() -> Path:
    """Return the folder of the model, made on the first call."""
    path = FOLDER / "causal"
    if not (path / "config.json").exists():
        saved_causal(
            path,
            words=16_000,
            hidden_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=1376,
            max_position_embeddings=2048,
        )
    return path


def contestants() -> dict[str, Contestant]:
    """Return the servers by name."""
    model = str(folder())
    serve = (
        *(PEERS_PYTHON, "-m", "transformers.cli.transformers", "serve", model, "--port", PORT),
        *("--continuous-batching", "--dtype", "float32", "--device", "cpu"),
        *("--cb-block-size", str(PAGE_TOKENS), "--cb-max-batch-tokens", str(STEP_TOKENS)),
        *("--cb-num-blocks", str(CACHE_TOKENS // PAGE_TOKENS)),
    )
    fastapi = (PEERS_PYTHON, "-m", "uvicorn", "benchmarks.peers.fastapi_generate:app")
    common: Any = {"path": PATH, "content_type": "application/json"}

    def first(text: str) -> bytes:
        return Ask(text, 4).body(model)

    def mine(**settings: object) -> Contestant:
        found = ours(folder(), max_batch_size=CLIENTS, cache_tokens=CACHE_TOKENS, **settings)
        return Contestant("onequeue", found.command, found.variables, body=first, **common)

    return {
        "onequeue": mine(),
        "onequeue, bfloat16": mine(dtype="bfloat16"),
        "transformers serve": Contestant("transformers serve", serve, body=first, **common),
        "FastAPI": Contestant(
            "FastAPI", (*fastapi, "--port", PORT), {"MODEL": model}, body=first, **common
        ),
    }


async def tokens_per_second(url: str, work: list[Ask]) -> float:
    """Let CLIENTS clients ask for all of `work`; return output tokens per second."""
    left = list(work)
    count = 0

    async def client() -> None:
        nonlocal count
        while left:
            body = left.pop().body(str(folder()))
            answer = await http.post(PATH, content=body)
            answer.raise_for_status()
            count += answer.json()["usage"]["completion_tokens"]

    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300) as http:
        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return count / (time.perf_counter() - started)


def measured(contestant: Contestant, work: list[Ask]) -> float:
    """Return the output tokens per second of a server."""
    with running(contestant) as server:
        asyncio.run(tokens_per_second(server.url, work[:CLIENTS]))
        return asyncio.run(tokens_per_second(server.url, work))


def without_http(work: list[Ask]) -> float:
    """Return the output tokens per second of the engine driven directly, in another process."""
    command = [PEERS_PYTHON, "-m", "benchmarks.local", "generate", str(folder())]
    lines = [[ask.prompt, ask.most] for ask in work]
    done = subprocess.run(
        command, input=json.dumps(lines), text=True, capture_output=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure in turns, and compare."""
    work = asks()
    ways: dict[str, Callable[[], float]] = {
        name: lambda each=each: measured(each, work)  # type: ignore[misc]
        for name, each in contestants().items()
    }
    ways["engine, no HTTP"] = lambda: without_http(work)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            rates[name].append(ways[name]())
            sys.stdout.write(f"{name}: {rates[name][-1]:.0f} tokens/s\n")
            sys.stdout.flush()
    medians = {name: statistics.median(found) for name, found in rates.items()}
    mine = medians["onequeue"]
    result: dict[str, float] = {name: round(rate) for name, rate in medians.items()}
    result |= {f"ratio to {name}": round(mine / rate, 2) for name, rate in medians.items()}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
