"""What the worker calls in the model thread.

Nothing here knows of requests, the queue or the event loop: values go in, values come out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from errors import RequestError
from model import Cost, Generator, Model, Output, Prepared, Staged


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` and return what it raises: a future cannot carry every exception.

    StopIteration would leave the worker waiting for ever, SystemExit would tear the loop down. And
    a panic of the tokenizer, which is written in Rust, is no Exception, but the input's fault.
    """
    try:
        return function(*arguments)
    except BaseException as error:  # noqa: BLE001 - whatever a model raises must not end the worker
        return error


def prepare(model: Model | Generator, values: list[Any]) -> Staged:
    """Prepare inputs."""
    started = time.perf_counter()
    prepared = _checked(model.prepare(values), values)
    return Staged(prepared, Cost(prepare_s=time.perf_counter() - started))


def prepare_and_run(
    model: Model, values: list[Any], split: Callable[[Sequence[Prepared]], list[list[int]]]
) -> Staged:
    """Prepare a batch and, if it needs no more than one forward pass, run it.

    In one call, since each return to the event loop waits behind the requests that it handles.
    """
    staged = prepare(model, values)
    valid = [value for value in staged.results if not isinstance(value, RequestError)]
    if len(split(valid)) != 1:
        return staged
    ran = run(model, valid)
    outputs = iter(ran.results)
    return Staged(
        [value if isinstance(value, RequestError) else next(outputs) for value in staged.results],
        replace(ran.cost, prepare_s=staged.cost.prepare_s),
    )


def run(model: Model, prepared: list[Any]) -> Staged:
    """Run one forward pass."""
    started = time.perf_counter()
    outputs = _checked(model.run(prepared), prepared)
    total_s, spent = time.perf_counter() - started, model.spent
    results = [
        output if isinstance(output, RequestError) else Output(output, each.tokens)
        for output, each in zip(outputs, prepared, strict=True)
    ]
    cost = Cost(
        forward_s=spent.forward_s,
        finish_s=max(0.0, total_s - spent.forward_s),
        inputs=len(prepared),
        tokens=sum(each.tokens for each in prepared),
        computed_tokens=spent.tokens,
    )
    return Staged(results, cost)


def _checked(results: Sequence[Any], values: list[Any]) -> list[Any]:
    """Return `results` if there is one for every value."""
    results = list(results)
    if len(results) != len(values):
        raise RuntimeError(f"the model gave {len(results)} results for {len(values)} inputs")
    return results


def groups(prepared: Sequence[Prepared], max_tokens: int, pads: bool) -> list[list[int]]:
    """Split prepared inputs into forward passes; return the indices of each.

    Each has one group, and within `max_tokens` tokens, counted as if all were as long as the
    longest if the model `pads`; an input that is longer than that goes alone.
    """
    by_group: dict[str, list[int]] = {}
    for index, each in enumerate(prepared):
        by_group.setdefault(each.group, []).append(index)
    passes: list[list[int]] = []
    for members in by_group.values():
        chunk: list[int] = []
        longest = total = 0
        for index in members:
            tokens = prepared[index].tokens
            longest, total = max(longest, tokens), total + tokens
            if not chunk or (longest * (len(chunk) + 1) if pads else total) > max_tokens:
                chunk, longest, total = [], tokens, tokens
                passes.append(chunk)
            chunk.append(index)
    return passes
