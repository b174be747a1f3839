from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.answers import Candidates, fault
from benchmarks.charts import Bar, Line, bar_chart, line_chart
from benchmarks.load import Answer, Run, closed_loop, open_loop, parse, post
from benchmarks.results import Point, against_peers

HEAD = b"HTTP/1.1 200 OK\r\nserver: x\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"content-length: 4\r\n\r\nbody",
        HEAD + b"Content-Length:4\r\nx: y\r\n\r\nbody",
        HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nbod\r\n1\r\ny\r\n0\r\n\r\n",
    ],
)
def test_an_answer_is_parsed_when_it_is_complete(answer: bytes) -> None:
    assert parse(answer) == (200, b"body")
    assert all(parse(answer[:end]) is None for end in range(len(answer)))


def test_an_answer_without_a_length_is_refused() -> None:
    with pytest.raises(ValueError, match="no length"):
        parse(HEAD + b"\r\n")


def run(*ends_s: float) -> Run:
    return Run(10, [Answer(0, 200, 0.5, end_s, b"") for end_s in ends_s])


def test_rate_counts_up_to_the_last_answer_in_time() -> None:
    assert run(2, 4, 8, 11).rate == 3 / 8
    assert run().rate == 0


def test_latencies_leave_out_failures_and_the_first_burst() -> None:
    mixed = Run(1, [Answer(0, 200, latency_s, 0, b"") for latency_s in (0.1, 0.2, 0.3)])
    mixed.answers += [Answer(0, 503, 9, 0, b""), Answer(0, 200, 9, 0, b"", early=True)]
    assert mixed.latency_ms(50) == pytest.approx(200)


def candidates(*tokens: int) -> Candidates:
    return [{"score": 1e-4, "token": token, "token_str": "a", "sequence": "b"} for token in tokens]


RIGHT = candidates(5, 4, 3, 2, 1)


@pytest.mark.parametrize(
    ("got", "kind"),
    [
        (RIGHT, None),
        ([RIGHT], None),
        (RIGHT[:4], "form"),
        ({"error": "no"}, "form"),
        (candidates(4, 5, 3, 2, 1), "tokens"),
        ([{**each, "sequence": "c"} for each in RIGHT], "words"),
        ([{**each, "score": 1.1e-4} for each in RIGHT], "score"),
        ([{**each, "score": float("nan")} for each in RIGHT], "score"),
    ],
)
def test_faults_of_answers_are_named(got: object, kind: str | None) -> None:
    assert fault(Answer(0, 200, 0, 0, json.dumps(got).encode()), RIGHT) == kind


def test_a_refusal_is_a_fault_and_its_form_does_not_matter() -> None:
    assert fault(Answer(0, 503, 0, 0, b""), RIGHT) == "status 503"
    assert fault(Answer(0, 200, 0, 0, b"{"), None) == "form"


class Echo(asyncio.Protocol):
    """Answers each request with its body, which must be the end of it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        body = data.partition(b"\r\n\r\n")[2]
        if body == b"leave":
            self.transport.abort()
        self.transport.write(HEAD + b"content-length: %d\r\n\r\n" % len(body))
        self.transport.write(body)


async def ask(texts: list[bytes], rate: float | None) -> Run:
    requests = [post(text) for text in texts]
    listening = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        if rate is None:
            return await closed_loop(port, requests, clients=3, seconds=0.3, limit=9)
        return await open_loop(port, requests, rate, seconds=0.2, connections=50)


def test_closed_loop_cycles_through_the_texts() -> None:
    done = asyncio.run(ask([b"a", b"bb"], None))
    assert sorted(answer.text for answer in done.answers) == [0] * 5 + [1] * 4
    assert all(answer.body == (b"a", b"bb")[answer.text] for answer in done.answers)


def test_open_loop_sends_at_its_rate() -> None:
    done = asyncio.run(ask([b"a"], 1000))
    assert 100 < len(done.answers) + done.unsent < 300


def test_a_broken_connection_is_an_answer_of_status_0() -> None:
    done = asyncio.run(ask([b"leave"], None))
    assert [answer.status for answer in done.answers] == [0, 0, 0]


def point(server: str, turn: int, rate: float, natural: bool = True) -> Point:
    batch = 32 if natural else 4
    return Point("tiny", server, f"{batch}", natural, batch, 32, turn, rate, 1, 2, {})


def test_ratios_are_formed_within_a_round_against_the_best_peer() -> None:
    points = [point("onequeue", 0, 100), point("onequeue", 1, 300)]
    points += [point("slow", 0, 1), point("slow", 1, 1)]
    points += [point("fast", 0, 10, natural=False), point("fast", 1, 20, natural=False)]
    assert against_peers(points, ("tiny", 32)) == 12.5
    assert against_peers(points, ("tiny", 32), natural=True) == 200
    assert against_peers(points, ("tiny", 32), mine="onequeue, int8") is None


def test_charts_hold_every_name() -> None:
    bars = bar_chart("t", "l", {"tiny": [Bar("a & b", 3, 1, False), Bar("mine", 9, None, True)]})
    lines = line_chart("t", "l", {"tiny": [Line("mine", [(1, 2), (8, 30)], True)]})
    assert "a &amp; b" in bars
    assert "mine" in bars
    assert "mine" in lines
