"""Threads of mixed requests, with and without truncation: nobody gets another's tokens."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest
from transformers import pipeline

from tests.models import BUNDLED, assert_same
from tests.servers import Server

CALLS, THREADS = int(os.environ.get("MIXED_CALLS", "2000")), 8
LONG = "The [MASK] barked. " + "It was a long day in the park. " * 60
CUT = {"tokenizer_kwargs": {"truncation": True}}
REQUESTS: list[dict[str, Any]] = [
    {"inputs": "The [MASK] barked."},
    {"inputs": "The [MASK] barked.", "parameters": {"top_k": 2}},
    {"inputs": LONG, "parameters": CUT},
    {"inputs": LONG, "parameters": {"tokenizer_kwargs": {"truncation": True, "max_length": 20}}},
    {"inputs": LONG, "parameters": {"tokenizer_kwargs": {"max_length": 100, "truncation": True}}},
    {"inputs": "A violin is an [MASK].", "parameters": CUT},
    {"inputs": ["A [MASK].", "The [MASK] of France is Paris."], "parameters": {"top_k": 1}},
    {"inputs": "A [MASK] day", "parameters": {"targets": ["good", "long"]}},
    {"inputs": LONG},  # too long
    {"inputs": "no mask", "parameters": CUT},
]


def expected_answers() -> list[Any]:
    """Ask the untouched pipeline; None where a request is to be refused."""
    untouched: Any = pipeline("fill-mask", model=BUNDLED, device="cpu", dtype="float32")
    untouched.tokenizer.model_max_length = 256
    return [
        untouched(request["inputs"], **request.get("parameters", {})) for request in REQUESTS[:-2]
    ] + [None, None]


@pytest.mark.timeout(600)
def test_mixed_requests_from_threads_get_their_own_answers(bundled: Server) -> None:
    expected = expected_answers()
    bodies = [json.dumps(request).encode() for request in REQUESTS]
    answers: list[dict[bytes, int]] = [{} for _ in REQUESTS]  # each body, and how often it came
    lock = threading.Lock()

    def ask(thread: int) -> None:
        with closing(HTTPConnection("127.0.0.1", bundled.port, timeout=60)) as client:
            for call in range(thread, CALLS, THREADS):
                which = call * 7 % len(REQUESTS)
                client.request("POST", "/", bodies[which], {"content-type": "application/json"})
                response = client.getresponse()
                assert response.status == (200 if expected[which] is not None else 422)
                body = response.read()
                with lock:
                    answers[which][body] = answers[which].get(body, 0) + 1

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(ask, range(THREADS)))
    assert sum(sum(seen.values()) for seen in answers) == CALLS
    for right, seen in zip(expected, answers, strict=True):
        for body in seen:
            if right is not None:
                assert_same(json.loads(body), right)
