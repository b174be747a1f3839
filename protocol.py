"""What uvicorn leaves open of a connection: how long heads and trailers may be and take, its end.

A body has its own bounds (MAX_BODY_BYTES and the deadline, in `api.http`), and uvicorn closes a
connection that is idle for 5 s after an answer.
"""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 10.0
HEAD_BYTES = 65_536
LAST_CALL_S = 1.0


class BoundedHeads(HttpToolsProtocol):
    """Closes a connection whose head does not come to its end."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = True
    _bytes = 0
    _segment = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a head."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        super().connection_lost(exc)
        self._stop_waiting()

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head that goes on."""
        self._segment = len(data)
        super().data_received(data)
        if not self._in_head:
            self._stop_waiting()
            return
        self._bytes += len(data)
        if self._bytes > HEAD_BYTES:
            self._refuse(431, f"the head of the request has more than {HEAD_BYTES} bytes")
        elif self._timer is None:
            self._wait()

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True
        self._bytes = 0

    def on_headers_complete(self) -> None:
        """End a head."""
        self._in_head = False
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """Expect a chunk or, behind the last one, trailers: these are bounded as a head is."""
        self._stop_waiting()
        self._in_head = True
        self._bytes = 1 - self._segment  # which holds the body before, too

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, which has bounds of its own."""
        self._in_head = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the body, and its trailers."""
        self._in_head = False
        super().on_message_complete()

    def shutdown(self) -> None:
        """Let an idle connection be for LAST_CALL_S when the server stops.

        A request that crosses the close is lost, and nobody knows whether it ran. Within this time
        it is told that the server stops, and proxies close what they do not use.
        """
        if self.cycle is None or self.cycle.response_complete:
            asyncio.get_running_loop().call_later(LAST_CALL_S, super().shutdown)
        else:
            super().shutdown()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEAD_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """Close the connection; without a word if nobody has begun a request that it answers.

        While a request is answered, its deadline holds.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait()
        elif self._bytes:
            self._refuse(408, f"the head of the request did not come within {HEAD_S:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, text: str) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started > self.cycle.response_complete:
            self.transport.close()  # in the middle of an answer it would be read as a part of it
            return
        body = json.dumps({"error": text, "error_type": "validation"}).encode()
        head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n"
        ends = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write((head + ends).encode() + body)
        self.transport.close()
