"""Load by locust: short and long inputs, lists, or generated texts.

    locust -f benchmarks/locustfile.py --host http://127.0.0.1:8000 Texts
    locust -f benchmarks/locustfile.py --host http://127.0.0.1:8000 Chats --new-tokens 64

`--words` is how many words an input has: one number, or `low-high`, or several with their weights,
such as `8:70,30:25,100:5`. A refusal (503) waits as long as the server says. Time to the first
token has a line of its own.
"""

from __future__ import annotations

import json
import random
import time
from argparse import ArgumentParser
from typing import Any

from locust import HttpUser, between, events, task

VOCABULARY = [
    "the",
    "a",
    "dog",
    "cat",
    "king",
    "river",
    "of",
    "in",
    "under",
    "small",
    "to",
    "is",
    "and",
    "green",
    "old",
    "house",
    "sings",
]


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    """Add what a load is made of."""
    parser.add_argument("--words", default="8:70,30:25,100:5", help="words of an input")
    parser.add_argument("--inputs", type=int, default=1, help="inputs of a request")
    parser.add_argument("--mask", default="[MASK]", help="put into each text; empty: none")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a generated text")
    parser.add_argument("--key", default="", help="Bearer key")


def words(distribution: str) -> int:
    """Draw a number of words from what `--words` says."""
    parts = [part.partition(":") for part in distribution.split(",")]
    sizes = [size for size, _, _ in parts]
    (drawn,) = random.choices(sizes, [float(weight or 1) for _, _, weight in parts])
    low, _, high = drawn.partition("-")
    return random.randint(int(low), int(high or low))


class Asking(HttpUser):
    """Somebody who asks, reads the answer, and asks again."""

    abstract = True
    wait_time = between(0, 0)

    @property
    def options(self) -> Any:
        """What the command line says."""
        return self.environment.parsed_options

    def text(self) -> str:
        """Return an input."""
        drawn = random.choices(VOCABULARY, k=words(self.options.words))
        if self.options.mask:
            drawn.insert(random.randrange(len(drawn) + 1), self.options.mask)
        return " ".join(drawn)

    def ask(self, path: str, body: Any, **more: Any) -> Any:
        """Send a request; wait if there is no room."""
        headers = {"authorization": f"Bearer {self.options.key}"} if self.options.key else {}
        answer = self.client.post(path, json=body, headers=headers, **more)
        if answer.status_code in (429, 503):
            time.sleep(float(answer.headers.get("retry-after", 1)))
        return answer


class Texts(Asking):
    """Asks for answers to texts."""

    @task
    def texts(self) -> None:
        """Send a text, or a list of them."""
        count = self.options.inputs
        self.ask(
            "/", {"inputs": self.text() if count == 1 else [self.text() for _ in range(count)]}
        )


class Chats(Asking):
    """Chats, and reads the answer as it comes."""

    @task
    def chat(self) -> None:
        """Send a message, read the stream, tell when its first token came."""
        messages = [{"role": "user", "content": self.text()}]
        body = {"messages": messages, "max_tokens": self.options.new_tokens, "stream": True}
        started = time.perf_counter()
        first_ms = 0.0
        for line in self.ask("/v1/chat/completions", body, stream=True).iter_lines():
            if not first_ms and line.startswith(b"data: {") and _has_text(line):
                first_ms = (time.perf_counter() - started) * 1000
        if first_ms:
            self.environment.events.request.fire(
                request_type="STREAM", name="first token", response_time=first_ms,
                response_length=0, exception=None, context={},
            )  # fmt: skip


def _has_text(line: bytes) -> bool:
    choices = json.loads(line[6:])["choices"]
    return bool(choices and choices[0]["delta"].get("content"))
