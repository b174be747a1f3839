"""The queue and the worker, without HTTP and without torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop

import batching
from batching import Batch, Batcher, BatchLimit
from config import Settings
from entries import Entry, Request
from errors import (
    ClientGone,
    DeadlinePassed,
    Interrupted,
    LoadError,
    ModelFailed,
    NotServing,
    Overloaded,
    Rejected,
)
from metrics import Metrics
from queueing import RequestQueue, State
from tests.fakes import FakeModel, FakePrepared, Gate
from worker import Worker

pytestmark = pytest.mark.anyio


def request(*inputs: str, timeout_s: float = 10.0, **parameters: Any) -> Request:
    return Request(inputs, parameters, asyncio.get_running_loop().time() + timeout_s)


@asynccontextmanager
async def serving(
    model: FakeModel, **settings: Any
) -> AsyncIterator[tuple[RequestQueue, asyncio.Task[None]]]:
    """Run a worker around `model`; at the end all gauges must be back at zero."""
    options = Settings(**settings)
    queue = RequestQueue(options, Metrics())
    running = asyncio.create_task(Worker(options, queue, lambda: model).run())
    while queue.state is State.LOADING:
        await asyncio.sleep(0.001)
    yield queue, running
    assert queue.depth == 0
    assert not queue.in_flight
    running.cancel()
    with suppress(asyncio.CancelledError, RuntimeError):
        await running


async def submit_behind(
    gate: Gate, queue: RequestQueue, *requests: Request
) -> list[asyncio.Task[Any]]:
    """Queue `requests` while another one, the first of the tasks returned, holds the model."""
    tasks = [asyncio.create_task(queue.submit(request("first")))]
    assert await asyncio.to_thread(gate.arrived.wait, 5)
    tasks += [asyncio.create_task(queue.submit(each)) for each in requests]
    await asyncio.sleep(0.01)
    return tasks


async def outputs(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """Return the outputs of each task, or the error that it got instead."""
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    return [
        result if isinstance(result, BaseException) else [each.output for each in result]
        for result in results
    ]


async def test_lone_request_is_answered() -> None:
    async with serving(FakeModel()) as (queue, _):
        (response,) = await queue.submit(request("hello"))
    assert response.output == "HELLO"
    assert response.batch_size == 1


async def test_wait_is_told_in_milliseconds() -> None:
    gate = Gate()
    async with serving(FakeModel(gate)) as (queue, _):
        tasks = await submit_behind(gate, queue, request("a"))
        await asyncio.sleep(0.05)
        gate.opened.set()
        _, (response,) = await asyncio.gather(*tasks)
    assert 50 <= response.queue_ms < 5000


async def test_next_batch_fills_while_the_model_is_busy_up_to_the_cap() -> None:
    gate = Gate()
    model = FakeModel(gate)
    async with serving(model, max_batch_size=4, batch_wait_ms=0) as (queue, _):
        waiting = [request(str(number)) for number in range(6)]
        tasks = await submit_behind(gate, queue, *waiting)
        assert queue.depth == 6
        gate.opened.set()
        assert await outputs(tasks) == [["FIRST"], *([str(n)] for n in range(6))]
    assert model.batches == [["first"], ["0", "1", "2", "3"], ["4", "5"]]


async def test_list_longer_than_a_batch_answers_in_order() -> None:
    texts = [f"text {number}" for number in range(50)]
    async with serving(FakeModel(), max_batch_size=8) as (queue, _):
        responses = await queue.submit(request(*texts))
    assert [response.output for response in responses] == [text.upper() for text in texts]


async def test_batch_waits_for_company_until_its_deadline() -> None:
    model = FakeModel()
    async with serving(model, batch_wait_ms=1000, max_batch_size=2) as (queue, _):
        first = asyncio.create_task(queue.submit(request("a")))
        await asyncio.sleep(0.02)
        assert not model.batches
        await asyncio.wait_for(queue.submit(request("b")), 0.9)  # full: goes at once
        await first
    assert model.batches == [["a", "b"]]


async def test_client_that_is_alone_need_not_wait() -> None:
    async with serving(FakeModel(), batch_wait_ms=1000) as (queue, _):
        await queue.submit(request("waits: nobody knows yet who will come"))
        await asyncio.wait_for(queue.submit(request("goes at once")), 0.9)
        gather = asyncio.gather(*(queue.submit(request(text)) for text in "ab"))
        await asyncio.wait_for(gather, 0.9)
        with pytest.raises(TimeoutError):  # the last batch had company: wait for it again
            await asyncio.wait_for(queue.submit(request("waits")), 0.1)


async def next_batch_of(enqueued_ago_s: list[float], **settings: Any) -> list[Entry]:
    """Build the batch that a worker makes of inputs queued so many seconds ago."""
    options = Settings(**settings)
    queue = RequestQueue(options, Metrics())
    queue.start_admitting()
    for ago in enqueued_ago_s:
        pending = request("x")
        queue._admit(pending)
        queue._entries._queue[-1].enqueued_at -= ago  # type: ignore[attr-defined]
    batcher = Batcher(options, queue, not_called)
    batch, _ = await asyncio.wait_for(batcher.next_batch(), 0.5)
    return batch


async def test_deadline_counts_from_the_enqueue_of_the_first_input() -> None:
    batch = await next_batch_of([2.0, 0.0], batch_wait_ms=1000)
    assert len(batch) == 2  # the first has waited its time; the second, queued just now, goes along


async def test_zero_wait_takes_what_is_there() -> None:
    assert len(await next_batch_of([0.0, 0.0, 0.0], batch_wait_ms=0)) == 3


@pytest.mark.parametrize(("batch_wait_ms", "expected"), [(1, 4), (0, 1)])
async def test_clients_of_a_large_batch_may_take_a_share_of_its_time_to_return(
    batch_wait_ms: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "RETURN_MAX_S", 5.0)
    options = Settings(batch_wait_ms=batch_wait_ms)
    queue = RequestQueue(options, Metrics())
    queue.start_admitting()
    batcher = Batcher(options, queue, not_called)
    now = asyncio.get_running_loop().time
    batcher._last = Batch(clients=4, taken_s=100.0, ended_at=now())
    queue._admit(request("back first"))
    batch = asyncio.create_task(batcher.next_batch())
    await asyncio.sleep(0.02)
    for _ in range(3):
        queue._admit(request("back"))
    assert (
        len((await asyncio.wait_for(batch, 1))[0]) == expected
    )  # and not the five seconds allowed


async def test_two_half_batches_that_take_turns_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "RETURN_SHARE", 1.0)
    gate = Gate()

    def hook(texts: list[str]) -> None:
        gate(texts)
        time.sleep(0.02)

    model = FakeModel(hook)

    async def ask(times: int) -> None:
        for _ in range(times):
            await queue.submit(request("again"))

    async with serving(model) as (queue, _), asyncio.TaskGroup() as clients:
        for _ in range(2):
            clients.create_task(ask(5))
        assert await asyncio.to_thread(gate.arrived.wait, 5)
        for _ in range(2):
            clients.create_task(ask(4))
        await asyncio.sleep(0.01)
        gate.opened.set()
    assert [len(batch) for batch in model.batches] == [2, 4, 4, 4, 4]


async def test_clients_of_a_batch_of_minutes_get_no_more_than_the_bound_to_return() -> None:
    options = Settings()
    queue = RequestQueue(options, Metrics())
    queue.start_admitting()
    batcher = Batcher(options, queue, not_called)
    batcher._last = Batch(clients=4, taken_s=600.0, ended_at=asyncio.get_running_loop().time())
    queue._admit(request("alone"))
    batch, _ = await asyncio.wait_for(batcher.next_batch(), 1)
    assert len(batch) == 1


async def test_late_arrivals_do_not_restart_the_deadline() -> None:
    options = Settings(batch_wait_ms=60)
    queue = RequestQueue(options, Metrics())
    queue.start_admitting()
    batch = asyncio.create_task(Batcher(options, queue, not_called).next_batch())
    while not batch.done():
        if queue.state is State.READY and len(queue.in_flight) < 1000:
            queue._admit(request("x"))
        await asyncio.sleep(0.005)
    assert 1 <= len((await batch)[0]) < 32  # a deadline that restarts would fill the batch


async def test_token_cap_splits_a_batch() -> None:
    model = FakeModel()
    async with serving(model, max_batch_tokens=4) as (queue, _):
        await queue.submit(request("a b", "c d", "e f"))
    assert model.batches == [["a b", "c d"], ["e f"]]


async def test_full_queue_refuses_at_once_and_counts_inputs() -> None:
    gate = Gate()
    async with serving(FakeModel(gate), max_queue_size=4) as (queue, _):
        tasks = await submit_behind(gate, queue, request("a", "b", "c"))
        with pytest.raises(Overloaded):
            await queue.submit(request("d", "e"))
        tasks.append(asyncio.create_task(queue.submit(request("f"))))
        gate.opened.set()
        assert await outputs(tasks) == [["FIRST"], ["A", "B", "C"], ["F"]]


async def test_retry_after_is_queued_inputs_over_the_drain_rate() -> None:
    queue = RequestQueue(Settings(), Metrics())
    assert queue.retry_after_s() == 1
    queue.record_drain(inputs=10, seconds=1.0)
    queue.depth = 42
    assert queue.retry_after_s() == 5
    queue.depth = 100_000
    assert queue.retry_after_s() == 30
    queue.record_drain(inputs=10, seconds=2.0)
    queue.depth = 95
    assert queue.retry_after_s() == 12  # a fifth of the way from 0.1 to 0.2 s per input


async def test_drain_rate_is_learnt_from_all_inputs_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learnt: list[int] = []
    async with serving(FakeModel()) as (queue, _):
        monkeypatch.setattr(queue, "record_drain", lambda inputs, _seconds: learnt.append(inputs))
        await queue.submit(request("a", "b", "c"))
    assert learnt == [3]


async def test_expired_request_is_refused_and_not_computed() -> None:
    gate = Gate()
    model = FakeModel(gate)
    async with serving(model) as (queue, _):
        tasks = await submit_behind(gate, queue, request("late", timeout_s=0.02), request("b"))
        with pytest.raises(DeadlinePassed):
            await tasks[1]
        assert queue.depth == 1
        gate.opened.set()
        await outputs(tasks)
    assert model.batches == [["first"], ["b"]]


async def test_deadline_in_the_past_is_never_computed() -> None:
    model = FakeModel()
    async with serving(model) as (queue, _):
        with pytest.raises(DeadlinePassed):
            await queue.submit(request("late", timeout_s=-1))
    assert model.batches == []


async def test_deadline_during_compute_answers_in_time() -> None:
    gate = Gate()
    async with serving(FakeModel(gate)) as (queue, _):
        with pytest.raises(DeadlinePassed):
            await queue.submit(request("slow", timeout_s=0.03))
        assert not queue.in_flight
        gate.opened.set()


async def test_hang_up_while_queued_costs_no_compute_and_frees_its_place() -> None:
    gate = Gate()
    model = FakeModel(gate)
    async with serving(model, max_queue_size=3) as (queue, _):
        gone = request("gone", "gone too")
        tasks = await submit_behind(gate, queue, gone, request("mate"))
        gone.hang_up()
        with pytest.raises(ClientGone):
            await tasks[1]
        assert queue.depth == 1
        tasks.append(asyncio.create_task(queue.submit(request("new", "newer"))))
        gate.opened.set()
        assert (await outputs(tasks))[2:] == [["MATE"], ["NEW", "NEWER"]]
    assert model.batches == [["first"], ["mate", "new", "newer"]]


async def test_hang_up_between_two_forward_passes_of_a_batch_costs_no_compute() -> None:
    gate = Gate()
    model = FakeModel(gate)
    async with serving(model, batch_wait_ms=50, max_batch_tokens=2) as (queue, _):
        gone = request("c d")
        tasks = [asyncio.create_task(queue.submit(each)) for each in (request("a b"), gone)]
        assert await asyncio.to_thread(gate.arrived.wait, 5)
        gone.hang_up()
        await asyncio.wait(tasks[1:])
        gate.opened.set()
        assert (await outputs(tasks))[0] == ["A B"]
    assert model.batches == [["a b"]]


async def test_input_is_wanted_until_its_deadline() -> None:
    given = request("a")
    entry = Entry(given, 0, "a", enqueued_at=0.0)
    assert entry.is_wanted(given.deadline - 0.001)
    assert not entry.is_wanted(given.deadline)


async def test_abandoned_request_holds_no_memory() -> None:
    gate = Gate()
    async with serving(FakeModel(gate)) as (queue, _):
        gone = request("a large text", "another")
        (first, waiting) = await submit_behind(gate, queue, gone)
        entries = list(gone.waiting)
        gone.hang_up()
        with pytest.raises(ClientGone):
            await waiting
        assert [each.value for each in entries] == [None, None]
        assert not gone.inputs
        gate.opened.set()
        await first


async def test_hang_up_during_compute_harms_nobody() -> None:
    gate = Gate()
    async with serving(FakeModel(gate), batch_wait_ms=50) as (queue, _):
        gone = request("gone")
        tasks = [asyncio.create_task(queue.submit(each)) for each in (gone, request("mate"))]
        assert await asyncio.to_thread(gate.arrived.wait, 5)
        gone.hang_up()
        gate.opened.set()
        error, answer = await outputs(tasks)
    assert isinstance(error, ClientGone)
    assert answer == ["MATE"]


async def test_invalid_input_is_refused_before_the_forward_and_its_mates_are_not() -> None:
    gate = Gate()
    model = FakeModel(gate)
    async with serving(model) as (queue, _):
        tasks = await submit_behind(gate, queue, request("a"), request("invalid"), request("b"))
        gate.opened.set()
        _, a, error, b = await outputs(tasks)
    assert (a, b) == (["A"], ["B"])
    assert isinstance(error, Rejected)
    assert model.batches[1:] == [["a", "b"]]


async def test_error_names_the_input_of_a_list() -> None:
    async with serving(FakeModel()) as (queue, _):
        with pytest.raises(Rejected, match=r"^inputs\[1\]: not a valid text$"):
            await queue.submit(request("a", "invalid", "c"))
        with pytest.raises(Rejected, match=r"^not a valid text$"):
            await queue.submit(request("invalid"))


async def not_called(*_arguments: Any) -> Any:
    """Stand in for the model thread where there is nothing to call."""


def raise_on(word: str, error: Callable[[], BaseException]) -> Callable[[list[str]], None]:
    def hook(texts: list[str]) -> None:
        if word in texts:
            raise error()

    return hook


class Panic(BaseException):
    """What a panic in Rust code looks like here."""


@pytest.mark.parametrize(
    "error",
    [RuntimeError, ArithmeticError, StopIteration, TimeoutError, asyncio.CancelledError, Panic],
)
@pytest.mark.parametrize("place", [0, 3, 6])
async def test_model_error_is_bisected_to_the_culprit(
    error: type[BaseException], place: int, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"t{number}" for number in range(6)]
    texts.insert(place, "culprit")
    model = FakeModel(raise_on("culprit", error))
    async with serving(model, batch_wait_ms=50, max_batch_size=7) as (queue, _):
        tasks = [asyncio.create_task(queue.submit(request(text))) for text in texts]
        answers = await outputs(tasks)
    assert isinstance(answers.pop(place), ModelFailed)
    assert answers == [[f"T{number}"] for number in range(6)]
    assert [record.message for record in caplog.records] == ["request -: the model failed"]


async def test_batch_that_is_too_large_for_the_memory_is_halved_and_the_next_are_smaller() -> None:
    def hook(texts: list[str]) -> None:
        if len(texts) > 3:
            raise MemoryError

    model = FakeModel(hook)
    async with serving(model, batch_wait_ms=50, max_batch_size=8) as (queue, _):
        for _ in range(2):
            tasks = [asyncio.create_task(queue.submit(request(text))) for text in "abcdefgh"]
            assert await outputs(tasks) == [[text.upper()] for text in "abcdefgh"]
        metrics = queue.metrics.written().decode()
    assert [len(batch) for batch in model.batches] == [2, 2, 2, 2, 2, 2, 2, 2]
    assert "onequeue_out_of_memory_total 3.0" in metrics
    assert "onequeue_batch_retries_total 3.0" in metrics
    assert list(map(type, model.memory.released)) == [MemoryError] * 3


async def test_batch_with_an_invalid_input_teaches_its_size_too() -> None:
    def hook(texts: list[str]) -> None:
        if len(texts) > 2:
            raise MemoryError

    model = FakeModel(hook)
    async with serving(model, batch_wait_ms=50, max_batch_size=8) as (queue, _):
        texts = ["a", "b", "c", "d", "invalid", "e", "f", "g"]
        await outputs([asyncio.create_task(queue.submit(request(text))) for text in texts])
        model.batches.clear()
        await outputs([asyncio.create_task(queue.submit(request(text))) for text in "hijk"])
    assert [len(batch) for batch in model.batches] == [2, 2]


async def test_input_that_is_too_large_for_the_memory_fails_alone() -> None:
    async with serving(FakeModel(raise_on("huge", MemoryError))) as (queue, _):
        with pytest.raises(ModelFailed, match=r"^the model ran out of memory on this input$"):
            await queue.submit(request("huge"))
        (response,) = await queue.submit(request("small"))
        assert response.output == "SMALL"


async def test_input_that_is_too_large_alone_makes_no_batch_smaller() -> None:
    model = FakeModel(raise_on("huge", MemoryError))
    async with serving(model, batch_wait_ms=50, max_batch_size=4) as (queue, _):
        for texts in (["huge", "a", "b", "c"], ["d", "e", "f", "g"]):
            tasks = [asyncio.create_task(queue.submit(request(text))) for text in texts]
            *_, last = await outputs(tasks)
            assert last == [texts[-1].upper()]
    assert model.batches[-1] == ["d", "e", "f", "g"]


async def test_a_call_that_waits_behind_another_is_watched_too() -> None:
    settings = Settings()
    worker = Worker(settings, RequestQueue(settings, Metrics()), FakeModel)
    gates = [Gate(), Gate()]
    calls = [asyncio.create_task(worker._call(gate, [])) for gate in gates]
    await asyncio.to_thread(gates[0].arrived.wait, 5)
    gates[0].opened.set()
    await calls[0]
    assert worker.busy_since is not None
    gates[1].opened.set()
    await calls[1]
    assert worker.busy_since is None
    worker._thread.shutdown()


def test_limit_of_batches_recovers_in_steps() -> None:
    limit = BatchLimit(20)
    limit.shrink(20)
    assert limit.size == 10
    limit.shrink(1)
    assert limit.size == 1
    sizes = []
    for _ in range(700):
        limit.recover()
        sizes.append(limit.size)
    assert sizes[98:100] == [1, 2]
    assert sizes[-1] == 20
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 20]


async def test_memory_is_looked_at_now_and_then() -> None:
    model = FakeModel()
    async with serving(model, memory_check_batches=3) as (queue, _):
        for _ in range(7):
            await queue.submit(request("a"))
    assert model.memory.tidied == 2


async def test_wrong_number_of_results_answers_nobody_with_anothers_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeModel, "run", lambda self, batch: ["only one"])
    async with serving(FakeModel(), batch_wait_ms=50, max_batch_size=2) as (queue, _):
        tasks = [asyncio.create_task(queue.submit(request(text))) for text in "ab"]
        assert await outputs(tasks) == [["only one"], ["only one"]]  # each alone: one result


async def test_wrong_number_of_prepared_inputs_does_not_end_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeModel, "prepare", lambda self, inputs: [FakePrepared("one", 1, "")])
    async with serving(FakeModel(), batch_wait_ms=50, max_batch_size=2) as (queue, _):
        tasks = [asyncio.create_task(queue.submit(request(text))) for text in "ab"]
        assert await outputs(tasks) == [["ONE"], ["ONE"]]


@pytest.mark.parametrize("results", [None, 5, ["too", "many"]])
async def test_results_that_are_no_results_are_a_model_failure(
    monkeypatch: pytest.MonkeyPatch, results: Any
) -> None:
    monkeypatch.setattr(FakeModel, "run", lambda self, batch: results)
    async with serving(FakeModel()) as (queue, _):
        with pytest.raises(ModelFailed):
            await queue.submit(request("a"))
        monkeypatch.setattr(FakeModel, "run", lambda self, batch: (each.text for each in batch))
        assert (await queue.submit(request("still alive")))[0].output == "still alive"


async def test_error_shared_by_several_inputs_names_each_by_its_own_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = Rejected("not today")
    monkeypatch.setattr(FakeModel, "prepare", lambda self, inputs: [shared for _ in inputs])
    async with serving(FakeModel(), batch_wait_ms=50, max_batch_size=3) as (queue, _):
        tasks = [asyncio.create_task(queue.submit(request(*texts))) for texts in ("ab", "c")]
        errors = await outputs(tasks)
    assert [str(error) for error in errors] == ["inputs[0]: not today", "not today"]


async def test_dead_worker_refuses_all_waiters_at_once() -> None:
    gate = Gate()

    def die(texts: list[str]) -> None:
        gate(texts)
        raise SystemExit(3)

    async with serving(FakeModel(die)) as (queue, running):
        tasks = await submit_behind(gate, queue, request("a", "b"), request("c"))
        gate.opened.set()
        assert list(map(type, await outputs(tasks))) == [Interrupted, NotServing, NotServing]
        assert queue.state is State.DEAD
        with pytest.raises(NotServing):
            await queue.submit(request("d"))
        with pytest.raises(RuntimeError, match="the model ended its thread"):
            await running


@pytest.mark.parametrize("error", [LoadError("no such model"), StopIteration(), Panic()])
async def test_failed_load_ends_the_worker(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> FakeModel:
        raise error

    queue = RequestQueue(Settings(), Metrics())
    worker = Worker(Settings(), queue, load)
    assert worker.alive()
    with pytest.raises((LoadError, RuntimeError)):
        await asyncio.wait_for(asyncio.create_task(worker.run()), 5)
    assert queue.state is State.DEAD
    assert not worker.alive()
    expected = "no such model" if isinstance(error, LoadError) else "the worker ended"
    assert [record.message for record in caplog.records] == [expected]


async def test_hung_call_is_not_alive() -> None:
    gate = Gate()
    options = Settings(watchdog_s=0.02)
    queue = RequestQueue(options, Metrics())
    worker = Worker(options, queue, lambda: FakeModel(gate))
    running = asyncio.create_task(worker.run())
    while queue.state is State.LOADING:
        await asyncio.sleep(0.001)
    assert worker.alive()
    task = asyncio.create_task(queue.submit(request("a")))
    await asyncio.sleep(0.05)
    assert not worker.alive()
    gate.opened.set()
    await task
    assert worker.alive()
    running.cancel()


async def test_drain_finishes_what_was_admitted_and_refuses_the_rest() -> None:
    gate = Gate()
    async with serving(FakeModel(gate)) as (queue, _):
        tasks = await submit_behind(gate, queue, request("a"))
        draining = asyncio.create_task(queue.drain(5))
        await asyncio.sleep(0.01)
        with pytest.raises(NotServing, match="draining"):
            await queue.submit(request("too late"))
        gate.opened.set()
        assert await outputs(tasks) == [["FIRST"], ["A"]]
        await asyncio.wait_for(draining, 1)


async def test_drain_that_takes_too_long_refuses_those_still_waiting() -> None:
    gate = Gate()
    async with serving(FakeModel(gate)) as (queue, _):
        tasks = await submit_behind(gate, queue, request("a"))
        await queue.drain(0.01)
        assert list(map(type, await outputs(tasks))) == [Interrupted, NotServing]
        gate.opened.set()


async def test_stopping_while_loading_never_admits() -> None:
    queue = RequestQueue(Settings(), Metrics())
    queue.stop_admitting()
    queue.start_admitting()
    with pytest.raises(NotServing, match="draining"):
        await queue.submit(request("a"))


def test_clock_of_uvloop_is_the_monotonic_one() -> None:
    async def difference_s() -> float:
        await asyncio.sleep(0.01)
        return abs(asyncio.get_running_loop().time() - time.monotonic())

    assert uvloop.run(difference_s()) < 0.05
