"""The queue and the worker around a model that answers token by token, without HTTP and torch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from config import Settings
from entries import Part, Request, Response, Switch
from errors import (
    ClientGone,
    DeadlinePassed,
    Interrupted,
    ModelFailed,
    NotServing,
    Overloaded,
    Rejected,
)
from metrics import Metrics
from queueing import RequestQueue, State
from tests.fakes import FakeGenerator
from worker import Worker

pytestmark = pytest.mark.anyio


def request(*inputs: str, timeout_s: float = 10.0, streams: bool = False) -> Request:
    deadline = asyncio.get_running_loop().time() + timeout_s
    return Request(inputs, {}, deadline, streams=streams)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(
    model: FakeGenerator, **settings: Any
) -> AsyncIterator[tuple[RequestQueue, Worker]]:
    """Run a worker around `model`; at the end nothing may be left of any request."""
    options = Settings(**settings)
    queue = RequestQueue(options, Metrics())
    worker = Worker(options, queue, lambda: model)
    running = asyncio.create_task(worker.run())
    await until(lambda: queue.state is not State.LOADING)
    yield queue, worker
    assert queue.depth == 0
    assert not queue.in_flight
    assert not model.running
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert model.closed


async def submit(queue: RequestQueue, model: FakeGenerator, each: Request) -> asyncio.Task[Any]:
    """Submit a request and wait until all of its inputs are generated for."""
    inputs = each.inputs
    task = asyncio.create_task(queue.submit(each))
    await until(lambda: all(name in model.running for name in inputs))
    return task


async def test_answers_come_in_the_order_of_the_inputs() -> None:
    model = FakeGenerator()
    async with serving(model) as (queue, _):
        task = await submit(queue, model, request("a", "b"))
        model.end("b", "B")
        model.say("a", "ignored")
        model.end("a", "A")
        responses = await task
    assert [response.output.text for response in responses] == ["A", "B"]
    assert [response.batch_size for response in responses] == [1, 2]


async def test_a_stream_yields_pieces_and_silences_and_then_the_answer() -> None:
    model = FakeGenerator()
    async with serving(model) as (queue, _):
        stream = queue.stream(request("a", streams=True), silence_s=0.02)
        assert await anext(stream) is None
        await until(lambda: "a" in model.running)
        model.say("a", "one")
        part = await anext(stream)
        assert isinstance(part, Part)
        assert part.piece.text == "one"
        model.end("a", "one two")
        whole = await anext(stream)
        assert isinstance(whole, Response)
        assert [each async for each in stream] == []


async def test_as_many_inputs_run_as_there_are_places() -> None:
    model = FakeGenerator()
    async with serving(model, max_batch_size=2) as (queue, _):
        tasks = [asyncio.create_task(queue.submit(request(name))) for name in "abc"]
        await until(lambda: len(model.running) == 2)
        await asyncio.sleep(0.02)
        assert list(model.running) == ["a", "b"]
        assert queue.depth == 1
        model.end("a", "A")
        await until(lambda: "c" in model.running)
        assert queue.depth == 0
        model.end("b", "B")
        model.end("c", "C")
        await asyncio.gather(*tasks)


async def test_what_the_model_cannot_take_is_refused_though_all_places_are_taken() -> None:
    model = FakeGenerator()
    async with serving(model, max_batch_size=1) as (queue, _):
        task = await submit(queue, model, request("a"))
        with pytest.raises(Rejected, match="too long"):
            await queue.submit(request("invalid"))
        model.end("a", "A")
        await task


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    model = FakeGenerator()
    async with serving(model, max_batch_size=1, max_queue_size=1) as (queue, _):
        first = await submit(queue, model, request("a"))
        second = asyncio.create_task(queue.submit(request("b")))
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded) as caught:
            await queue.submit(request("c"))
        assert caught.value.retry_after_s >= 1
        model.end("a", "A")
        await until(lambda: "b" in model.running)
        model.end("b", "B")
        await asyncio.gather(first, second)
        assert queue._seconds_per_input > 0


async def test_a_switch_while_the_model_is_rebuilt_leaves_nobody_refused() -> None:
    rebuilt = threading.Event()
    model, other = FakeGenerator(lambda: rebuilt.wait(5)), FakeGenerator()
    async with serving(model) as (queue, _):
        task = await submit(queue, model, request("a"))
        model.broken = True
        model.fail("a")
        with pytest.raises(Interrupted):
            await task
        await until(lambda: queue.state is State.RECOVERING)
        switch = Switch(other)
        queue.switch(switch)
        await switch.taken.wait()
        assert queue.state is State.READY
        rebuilt.set()
        task = await submit(queue, other, request("b"))
        other.end("b", "B")
        await task
        await switch.done.wait()
        assert queue.state is State.READY


async def test_a_model_that_stays_broken_takes_the_next_one_not_along() -> None:
    tried = threading.Event()

    def fail() -> None:
        tried.wait(5)
        raise RuntimeError("no memory")

    model, other = FakeGenerator(fail), FakeGenerator()
    async with serving(model, max_batch_size=1) as (queue, _):
        first = await submit(queue, model, request("a"))
        second = asyncio.create_task(queue.submit(request("b")))
        await asyncio.sleep(0.01)
        model.broken = True
        model.fail("a")
        await until(lambda: queue.state is State.RECOVERING)
        switch = Switch(other)
        queue.switch(switch)
        await switch.taken.wait()
        tried.set()
        for task in (first, second):
            with pytest.raises(Interrupted):
                await task
        third = await submit(queue, other, request("c"))
        other.end("c", "C")
        await third
        await switch.done.wait()


async def test_a_hang_up_stops_the_generation_and_frees_the_place() -> None:
    model = FakeGenerator()
    async with serving(model, max_batch_size=1) as (queue, _):
        leaver = request("a")
        task = await submit(queue, model, leaver)
        leaver.hang_up()
        with pytest.raises(ClientGone):
            await task
        assert model.stopped == ["a"]
        task = await submit(queue, model, request("b"))
        model.end("b", "B")
        await task


async def test_a_deadline_stops_the_generation() -> None:
    model = FakeGenerator()
    async with serving(model) as (queue, _):
        with pytest.raises(DeadlinePassed):
            await queue.submit(request("a", timeout_s=0.5))
        assert model.stopped == ["a"]
        stream = queue.stream(request("b", timeout_s=0.5, streams=True), silence_s=5)
        with pytest.raises(DeadlinePassed):
            await anext(stream)
        assert model.stopped == ["a", "b"]


async def test_a_stream_that_is_closed_stops_the_generation() -> None:
    model = FakeGenerator()
    async with serving(model) as (queue, _):
        async with aclosing(queue.stream(request("a", streams=True), 5)) as stream:
            first = asyncio.create_task(anext(stream))
            await until(lambda: "a" in model.running)
            model.say("a", "one")
            await first
        assert model.stopped == ["a"]


async def test_what_expired_in_the_queue_is_never_started() -> None:
    model = FakeGenerator()
    async with serving(model, max_batch_size=1) as (queue, _):
        first = await submit(queue, model, request("a"))
        with pytest.raises(DeadlinePassed):
            await queue.submit(request("late", timeout_s=0.03))
        model.end("a", "A")
        await first
        task = await submit(queue, model, request("b"))
        assert "late" not in model.stopped
        model.end("b", "B")
        await task


async def test_an_input_that_fails_harms_no_other() -> None:
    model = FakeGenerator()
    async with serving(model) as (queue, _):
        bad = await submit(queue, model, request("bad"))
        good = await submit(queue, model, request("good"))
        model.fail("bad")
        with pytest.raises(ModelFailed):
            await bad
        model.end("good", "G")
        await good
        assert queue.state is State.READY


async def test_a_broken_model_refuses_what_runs_and_is_made_whole() -> None:
    gate = threading.Event()
    model = FakeGenerator(restart_hook=partial(gate.wait, 5))
    async with serving(model, max_batch_size=1) as (queue, _):
        running = await submit(queue, model, request("a"))
        waiting = asyncio.create_task(queue.submit(request("b")))
        await asyncio.sleep(0.01)
        model.broken = True
        model.fail("a")
        with pytest.raises(Interrupted):
            await running
        await until(lambda: queue.state is State.RECOVERING)
        with pytest.raises(NotServing, match="recovering"):
            await queue.submit(request("c"))
        gate.set()
        await until(lambda: "b" in model.running)  # what waited is not lost
        assert queue.state is State.READY
        model.end("b", "B")
        await waiting


async def test_a_model_found_broken_at_the_start_is_made_whole() -> None:
    model = FakeGenerator(broken=True)
    async with serving(model) as (queue, _):
        task = await submit(queue, model, request("a"))
        assert queue.state is State.READY
        model.end("a", "A")
        await task


async def test_a_model_that_cannot_be_made_whole_ends_the_worker() -> None:
    def fail() -> None:
        raise OSError("no memory")

    model = FakeGenerator(restart_hook=fail, broken=True)
    options = Settings()
    queue = RequestQueue(options, Metrics())
    task = asyncio.create_task(Worker(options, queue, lambda: model).run())
    await until(lambda: queue.state is State.READY)
    with pytest.raises(NotServing):
        await queue.submit(request("a"))
    with pytest.raises(BaseExceptionGroup):
        await asyncio.wait_for(task, 5)
    assert queue.state is State.DEAD


async def test_a_model_that_owes_a_token_too_long_is_not_alive() -> None:
    model = FakeGenerator()
    async with serving(model, watchdog_s=0.05) as (queue, worker):
        assert worker.alive()
        task = await submit(queue, model, request("a"))
        await until(lambda: not worker.alive())
        model.say("a", "one")
        assert worker.alive()
        model.end("a", "A")
        await task
        await asyncio.sleep(0.06)
        assert worker.alive()
        assert worker.busy_since is None
