"""What the server costs besides time under load: accuracy of a dtype, memory, time per request."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path

import httpx

from benchmarks.answers import references
from benchmarks.contestants import ours, running
from benchmarks.load import closed_loop
from benchmarks.local import LATENCY_TEXTS, long_texts, peak, reset_peak
from benchmarks.models import sentences
from tests.processes import ROOT, environment

PART = 100  # inputs per request
ROUNDS = 2


def agreement(model: Path, dtype: str) -> float:
    """Return the share of sentences whose first answer in `dtype` is that of float32."""
    texts = sentences()
    got: list[int] = []
    with running(ours(model, dtype=dtype)) as server:
        for start in range(0, len(texts), PART):
            body = {"inputs": texts[start : start + PART], "parameters": {"top_k": 1}}
            answer = httpx.post(server.url, json=body, timeout=60).raise_for_status()
            got += [candidates[0]["token"] for candidates in answer.json()]
    right: list[int] = [candidates[0]["token"] for candidates in references(model)]
    same = [mine == other for mine, other in zip(got, right, strict=True)]
    return sum(same) / len(same)


def memory(model: Path) -> tuple[int, int]:
    """Return how much one batch of long texts raises the peak memory, in bytes: ours, pipeline."""
    with running(ours(model)) as server:
        before = reset_peak(server.pid)
        httpx.post(server.url, json={"inputs": long_texts()}, timeout=60).raise_for_status()
        mine = peak(server.pid) - before
    pipeline = subprocess.run(
        _local("memory", model), cwd=ROOT, env=environment(), capture_output=True, check=True
    )
    return mine, int(pipeline.stdout)


def overhead_ms(model: Path) -> tuple[float, float]:
    """Return the p50 of one client over HTTP and of direct calls of the model, taken in turns."""
    contestant = ours(model)
    requests = contestant.requests()[:LATENCY_TEXTS]
    served: list[float] = []
    direct: list[float] = []
    with running(contestant) as server, _direct(model) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(ROUNDS + 1):
            run = asyncio.run(closed_loop(server.port, requests, 1, 60, limit=len(requests)))
            served += [answer.latency_s * 1000 for answer in run.answers]
            process.stdin.write("go\n")
            process.stdin.flush()
            direct += json.loads(process.stdout.readline())
        process.stdin.close()
    warm = slice(LATENCY_TEXTS, None)
    return statistics.median(served[warm]), statistics.median(direct[warm])


def _direct(model: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        _local("latency", model),
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _local(what: str, model: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.local", what, str(model)]
