"""Every way a request can end without its answer.

    RequestError
    ├── InvalidRequest        the bytes or the input cannot be used
    │   ├── Malformed             not JSON, not UTF-8
    │   ├── Empty                 nothing to work on
    │   ├── TooLarge              more bytes or inputs than the server takes
    │   ├── UnsupportedType       a content type that this task has no use for
    │   └── Rejected              the input or a parameter does not fit the model
    ├── Unauthorized          the key is missing or wrong
    ├── Conflict              what is asked for is being done already
    ├── ModelFailed           the model raised on this input
    ├── Interrupted           begun, but the model or the server ended before the answer
    ├── Unavailable           come back later
    │   ├── Overloaded            the queue is full
    │   └── NotServing            loading, draining, or dead
    ├── DeadlinePassed        the answer would come too late
    └── ClientGone            nobody is left to answer

The HTTP status of each is one table in `server.py`. The text of an error is shown to the client: it
holds no traceback, no address and no input.

`LoadError` is the one error that ends the process instead of a request.
"""

from __future__ import annotations


class RequestError(Exception):
    """A request that ends without its answer.

    Attributes:
        error_type: The `error_type` of the JSON body.
        outcome: What metrics and logs call such an end.
        index: Which input of a list is at fault; None: the request as a whole, or its only input.
    """

    error_type = "validation"
    outcome = "invalid"
    index: int | None = None

    def __str__(self) -> str:
        """Return the text for the client, naming the input at fault."""
        text = super().__str__()
        return text if self.index is None else f"inputs[{self.index}]: {text}"


class InvalidRequest(RequestError):
    """The bytes or the input cannot be used."""


class Malformed(InvalidRequest):
    """The body is not what its content type says."""


class Empty(InvalidRequest):
    """There is nothing to work on."""

    error_type = "empty"


class TooLarge(InvalidRequest):
    """More bytes or inputs than the server takes in one request."""

    error_type = "too_large"


class UnsupportedType(InvalidRequest):
    """A content type that this task has no use for."""


class Rejected(InvalidRequest):
    """The input or a parameter does not fit the model."""


class Unauthorized(RequestError):
    """The key is missing or wrong."""

    error_type = "unauthorized"


class Conflict(RequestError):
    """What is asked for is being done already."""

    error_type = "conflict"


class ModelFailed(RequestError):
    """The model raised on this input."""

    error_type = "backend"
    outcome = "failed"


class Interrupted(RequestError):
    """Its computation had begun when the model or the server ended.

    It may be what they ended of, so that no proxy should hand it to the next server by itself.
    """

    error_type = "backend"
    outcome = "failed"


class Unavailable(RequestError):
    """Nothing of the request was computed, and it may succeed later, or elsewhere at once.

    Attributes:
        reason: In one word, for metrics.
        retry_after_s: When to come back, in whole seconds.
    """

    error_type = "unhealthy"
    outcome = "rejected"

    def __init__(self, text: str, retry_after_s: int = 1, reason: str = "") -> None:
        """Tell why and when to come back."""
        super().__init__(text)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Overloaded(Unavailable):
    """The queue is full."""

    error_type = "overloaded"


class NotServing(Unavailable):
    """The model is loading, the server is stopping, or the worker is dead."""


class DeadlinePassed(RequestError):
    """The answer would come too late."""

    error_type = "timeout"
    outcome = "expired"


class ClientGone(RequestError):
    """The client hung up; nobody is left to answer."""

    outcome = "cancelled"


class LoadError(Exception):
    """The model cannot be loaded; the text says why in one line."""
