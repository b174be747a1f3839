from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import pytest

from telemetry import JsonFormatter, TurnHandler
from tests.processes import server

SLOW = "tests.apps:slow"


def test_json_log_line_holds_message_and_traceback() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("a.b", 40, "f", 1, "it is %s", ("bad\n",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["level"] == "error"
    assert fields["logger"] == "a.b"
    assert "cause" not in fields
    assert fields["message"] == "it is bad\n"
    assert "ValueError: no" in fields["exception"]


class Output(StringIO):
    """Remembers each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)


@pytest.fixture
def handler() -> Iterator[TurnHandler]:
    handler = TurnHandler(Output())
    logger = logging.getLogger("turns")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield handler
    logger.removeHandler(handler)


def written(handler: TurnHandler) -> list[str]:
    assert isinstance(handler._output, Output)
    return handler._output.writes


@pytest.mark.anyio
async def test_lines_of_a_turn_are_written_at_once(handler: TurnHandler) -> None:
    for turn in range(2):
        for line in "ab":
            logging.getLogger("turns").info("%s%d", line, turn)
        assert len(written(handler)) == turn
        await asyncio.sleep(0)
    assert written(handler) == ["a0\nb0\n", "a1\nb1\n"]


@pytest.mark.anyio
async def test_lines_of_other_threads_do_not_wait_for_the_event_loop(handler: TurnHandler) -> None:
    logging.getLogger("turns").info("of the loop")
    await asyncio.to_thread(logging.getLogger("turns").info, "of a thread")
    assert "".join(written(handler)) == "of the loop\nof a thread\n"


@pytest.mark.anyio
async def test_a_process_that_ends_writes_what_is_left(handler: TurnHandler) -> None:
    logging.getLogger("turns").info("last words")
    assert not written(handler)
    handler.close()
    assert written(handler) == ["last words\n"]


@pytest.mark.anyio
async def test_output_that_cannot_be_written_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    output = Output()
    output.write = Mock(side_effect=BrokenPipeError)  # type: ignore[method-assign]
    handler = TurnHandler(output)
    logging.getLogger("asyncio").addHandler(handler)
    handler.handle(logging.makeLogRecord({"msg": "a line"}))
    for _ in range(5):
        await asyncio.sleep(0)
    logging.getLogger("asyncio").removeHandler(handler)
    assert output.write.call_count == 1
    assert caplog.records == []


def test_a_line_is_not_lost_with_the_loop_that_it_waited_for(handler: TurnHandler) -> None:
    loop = asyncio.new_event_loop()

    async def log(line: str) -> None:
        logging.getLogger("turns").info(line)

    loop.run_until_complete(log("lost?"))
    loop.close()
    asyncio.run(log("next"))
    logging.getLogger("turns").info("no loop")
    assert "".join(written(handler)) == "lost?\nnext\nno loop\n"


def test_every_line_of_the_process_is_json_when_asked(tmp_path: Path) -> None:
    with server(SLOW, tmp_path, batch_s=0, log_format="json") as running:
        running.wait_until_ready()
        running.post("invalid")
        assert running.stop() == 0
        lines = [json.loads(line) for line in running.log.splitlines()]
    assert {"uvicorn.error", "telemetry"} <= {line["logger"] for line in lines}
    (request,) = [line for line in lines if line["logger"] == "telemetry"]
    assert (request["method"], request["path"], request["status"]) == ("POST", "/", 422)
    assert request["time"].endswith("+00:00")


def test_level_hides_what_is_less_severe(tmp_path: Path) -> None:
    with server(SLOW, tmp_path, batch_s=0, log_level="error") as running:
        running.wait_until_ready()
        running.stop()
        assert running.log == ""
