"""onequeue against the limit of the processor: base shape, float32, 32 clients.

    make bench-limit

The limit is OpenVINO's float32 rate on rows without padding, with no server around it: tokens per
second over the mean number of tokens of a sentence. In turns with it, the rate of onequeue over
HTTP; and the rate of a large matrix product, which bounds them both.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import openvino
import torch
import transformers

from benchmarks.contestants import ours, running
from benchmarks.load import closed_loop
from benchmarks.models import model_folder, sentences
from cpus import available_cpus

ROWS = ((1, 128), (8, 128), (32, 20), (1, 512))
HINTS = ("LATENCY", "THROUGHPUT")
CLIENTS = 32
WARM_UP_S, SERVER_S, LIMIT_S = 3.0, 10.0, 1.5
ROUNDS = 3
TARGET = 0.9
SQUARE = 2048


class Needed(torch.nn.Module):
    """The part of a masked language model that fill-mask needs: encoder, and the head at masks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder, self.head = model.bert, model.cls

    def forward(self, input_ids: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        """Return logits [masks, words] of ids [rows, tokens] and places in the flattened rows."""
        hidden = self.encoder(input_ids).last_hidden_state
        logits: torch.Tensor = self.head(hidden.flatten(0, 1)[masks])
        return logits


@dataclass(frozen=True)
class Limit:
    """A compiled model on rows of one size; `step` starts one run or more."""

    name: str
    tokens: int
    step: Callable[[], None]
    finish: Callable[[], None]

    def tokens_per_s(self) -> float:
        """Measure for LIMIT_S."""
        self.step()
        self.finish()
        started, count = time.perf_counter(), 0
        while time.perf_counter() < started + LIMIT_S:
            self.step()
            count += 1
        self.finish()
        return count * self.tokens / (time.perf_counter() - started)


def limits(model: Any, tokens_per_sentence: float) -> list[Limit]:
    """Compile the model for every size of rows, for one run at a time and for several."""
    example = torch.randint(5, 30_000, (2, 64)), torch.arange(3)
    converted = openvino.convert_model(Needed(model), example_input=example)
    found = []
    for (rows, length), hint in product(ROWS, HINTS):
        masks = max(1, round(rows * length / tokens_per_sentence))
        converted.reshape({0: [rows, length], 1: [masks]})
        options = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": hint}
        options["INFERENCE_NUM_THREADS"] = str(available_cpus())
        compiled = openvino.Core().compile_model(converted, "CPU", options)
        queue = openvino.AsyncInferQueue(compiled)  # as many at once as the hint wants
        ids = torch.randint(5, 30_000, (rows, length)).numpy()
        places = (torch.arange(masks) * (rows * length // masks)).numpy()
        step = partial(queue.start_async, (ids, places))
        name = f"{rows} x {length} tokens, {hint.lower()}"
        found.append(Limit(name, rows * length, step, queue.wait_all))
    return found


def gemm_flops() -> float:
    """Return the floating point operations per second of a large float32 matrix product."""
    a, b = torch.rand(2, SQUARE, SQUARE)
    times_s = []
    for _ in range(10):
        started = time.perf_counter()
        torch.mm(a, b)
        times_s.append(time.perf_counter() - started)
    return 2 * SQUARE**3 / statistics.median(times_s)


def flops(model: Any, lengths: list[int]) -> float:
    """Return the floating point operations that a sentence needs on average."""
    config = model.config
    encoder = sum(each.numel() for each in model.bert.encoder.parameters() if each.ndim == 2)
    head = config.hidden_size * (config.hidden_size + config.vocab_size)
    attention = 2 * config.num_hidden_layers * config.hidden_size
    return 2 * float(statistics.mean(n * (encoder + attention * n) + head for n in lengths))


def main() -> None:
    """Measure in turns and print."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(available_cpus())
    folder = model_folder("base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lengths = [len(tokenizer(text)["input_ids"]) for text in sentences()]
    mean = statistics.mean(lengths)
    model = transformers.BertForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    candidates = limits(model, mean)
    contestant = ours(folder, dtype="float32")
    requests = contestant.requests()
    rates, peaks, found = [], [], []
    with running(contestant) as server:
        asyncio.run(closed_loop(server.port, requests, CLIENTS, WARM_UP_S))
        for _ in range(ROUNDS):
            rates.append(asyncio.run(closed_loop(server.port, requests, CLIENTS, SERVER_S)).rate)
            found.append([each.tokens_per_s() / mean for each in candidates])
            peaks.append(gemm_flops())
    sys.stdout.write(f"{mean:.2f} tokens per sentence\n")
    tell("onequeue, req/s", rates)
    by_candidate = [list(values) for values in zip(*found, strict=True)]
    for candidate, values in zip(candidates, by_candidate, strict=True):
        tell(f"OpenVINO, sentences/s, {candidate.name}", values)
    tell("matrix product, GFLOP/s", [peak / 1e9 for peak in peaks])
    needed = flops(model, lengths)
    tell("of the matrix product", [needed * r / p for r, p in zip(rates, peaks, strict=True)])
    limit = max(by_candidate, key=statistics.median)
    ratio = tell("of the limit", [r / top for r, top in zip(rates, limit, strict=True)])
    sys.stdout.write(f"target {TARGET}: {'pass' if ratio >= TARGET else 'miss'}\n")


def tell(what: str, values: Sequence[float]) -> float:
    """Print the median of a figure and its rounds; return the median."""
    median = statistics.median(values)
    rounds = ", ".join(f"{value:.2f}" for value in values)
    sys.stdout.write(f"{what}: {median:.2f} ({rounds})\n")
    return median


if __name__ == "__main__":
    main()
