"""What the model costs in a process of its own, without a server. Helpers of `benchmarks.costs`.

python -m benchmarks.local memory FOLDER     # prints the growth of the peak memory, in bytes
python -m benchmarks.local latency FOLDER    # for each line read, prints latencies in ms
python -m benchmarks.local generate FOLDER   # reads [[prompt, new tokens], ...], prints tokens/s
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.models import sentences

BATCH = 32
TOKENS = 128
LATENCY_TEXTS = 60


def long_texts() -> list[str]:
    """Return a batch of texts of TOKENS tokens: one mask, and words that are one token each."""
    return ["[MASK]" + " the" * (TOKENS - 3)] * BATCH  # and [CLS], [SEP]


def reset_peak(pid: int) -> int:
    """Set the peak memory of a process to what it holds now; return that, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status(pid, "VmRSS")


def peak(pid: int) -> int:
    """Return the peak memory of a process, in bytes."""
    return _status(pid, "VmHWM")


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def memory_of_pipeline(model: str) -> int:
    """Return how much the untouched pipeline's peak memory grows with one batch, in bytes."""
    import torch
    import transformers

    pipeline = transformers.pipeline("fill-mask", model=model, dtype=torch.float32)
    pipeline(sentences()[0])
    before = reset_peak(os.getpid())
    pipeline(long_texts(), batch_size=BATCH)
    return peak(os.getpid()) - before


def latencies_of_model(model: str) -> None:
    """Whenever a line comes in, answer with the latencies of our model side, text by text."""
    from config import Settings
    from inference.loading import load

    loaded: Any = load(Settings(model_id=model))  # what `prepare` returns goes into `run`
    for _ in sys.stdin:
        latencies_ms = []
        for text in sentences()[:LATENCY_TEXTS]:
            started = time.perf_counter()
            loaded.run(loaded.prepare([(text, {})]))
            latencies_ms.append((time.perf_counter() - started) * 1000)
        sys.stdout.write(json.dumps(latencies_ms) + "\n")
        sys.stdout.flush()


def engine_without_http(model: str) -> float:
    """Return the output tokens per second of transformers' continuous batching by itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
    work = [(tokenizer(prompt)["input_ids"], most) for prompt, most in json.loads(sys.stdin.read())]
    manager = loaded.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=tokenizer.eos_token_id),
        ContinuousBatchingConfig(
            page_size=32, num_blocks=512, max_batch_tokens=512, max_requests_per_batch=16
        ),
    )
    with torch.inference_mode():
        manager.start()
    started = time.perf_counter()
    for prompt, most in work:
        manager.add_request(prompt, max_new_tokens=most)
    count = sum(len(manager.get_result(timeout=60).generated_tokens) for _ in work)
    rate = count / (time.perf_counter() - started)
    manager.stop(block=True)
    return rate


if __name__ == "__main__":
    if sys.argv[1] == "memory":
        sys.stdout.write(f"{memory_of_pipeline(sys.argv[2])}\n")
    elif sys.argv[1] == "generate":
        sys.stdout.write(f"{engine_without_http(sys.argv[2])}\n")
    else:
        latencies_of_model(sys.argv[2])
