"""transformers' continuous batching as this server uses it: a manager that can be lost and made.

The engine runs in a thread of its own. It keeps keys and values in pages, takes a new prompt in at
any step, and every step gives each request its next token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.logits_process import LogitsProcessorList

from inference.sampling import Sampler, Sampling

logger = logging.getLogger(__name__)

LOGGER = "ContinuousBatchingLogger"
PAGE_TOKENS = 32
POLL_S = 0.005
STOP_S = 5.0
TRIAL_STEP_TOKENS = 48  # so that a long prompt takes several steps


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine may take.

    Attributes:
        cache_tokens: Whose keys and values it keeps.
        step_tokens: In one forward pass.
        requests: In one forward pass.
    """

    cache_tokens: int
    step_tokens: int
    requests: int


class Router(OutputRouter):  # type: ignore[misc, unused-ignore]
    """Sends the outputs of a step to the event loop in one call."""

    def __init__(self, deliver: Callable[[Sequence[GenerationOutput]], None]) -> None:
        super().__init__()
        self._deliver = deliver
        self._loop: asyncio.AbstractEventLoop | None = None

    def on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver on `loop` from now on."""
        self._loop = loop

    def deliver(self, output: GenerationOutput) -> None:
        """Send one output."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        """Send the outputs of a step."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)


class Engine:
    """The manager of a model.

    Args:
        model: Whose attention goes with it.
        ends: The tokens that end a text.
        limits: Of the engine.
        deliver: Called on the event loop with what each request has so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ends: Collection[int],
        limits: Limits,
        deliver: Callable[[Sequence[GenerationOutput]], None],
    ) -> None:
        self._model = model
        self._ends = list(ends)
        self._limits = limits
        self._router = Router(deliver)
        self._manager = self._start()

    @property
    def broken(self) -> bool:
        """Whether an error has ended its thread, or is about to."""
        manager = self._manager
        refuses = manager.background_thread_status.can_accept_new_requests() is not None
        return refuses or not manager.is_running()

    def add(self, request_id: str, tokens: Sequence[int], most: int, sampler: Sampler) -> bool:
        """Take a prompt in, on the event loop; tell whether that was done: the engine is whole.

        Args:
            request_id: Of no other request.
            tokens: Of the prompt.
            most: So many new ones.
            sampler: Chooses them.
        """
        self._router.on(asyncio.get_running_loop())
        taken = self._manager.add_request(
            list(tokens), request_id, most, streaming=True, sampler=sampler
        )
        return taken is not None

    def cancel(self, request_id: str) -> None:
        """Give a request up and free what it holds, at the next step."""
        self._manager.cancel_request(request_id)

    def restart(self) -> None:
        """Replace what is broken."""
        self.close()
        self._manager = self._start()

    def close(self) -> None:
        """End the thread; what it still generates is lost."""
        self._manager.stop(block=True, timeout=STOP_S, hard_stop=True)

    def cache_use(self) -> tuple[int, int]:
        """Return for how many tokens running requests hold pages, and for how many there are pages.

        Pages of requests that have ended may be kept for prompts that begin alike, but whoever
        needs them gets them: they count as free.
        """
        processor = self._manager.batch_processor
        if processor is None:
            return 0, 0
        held = [
            len({page for pages in list(allocator.block_table.values()) for page in pages})
            for allocator in processor.cache.cache_allocators.values()
        ]
        return max(held, default=0) * PAGE_TOKENS, processor.cache.num_blocks * PAGE_TOKENS

    def _start(self) -> ContinuousBatchingManager:
        manager = _manager(self._model, self._ends, self._limits)
        manager.logit_processor = ContinuousBatchingLogitsProcessorList(
            LogitsProcessorList([Sampling()])
        )
        manager.logit_processor.tensors_required = 1  # a row that stays empty
        manager.output_router = self._router
        with torch.inference_mode():  # the thread inherits it
            manager.start()
        while manager.batch_processor is None:  # the thread allocates the cache first
            if not manager.is_running():
                raise RuntimeError("the engine does not start: is there memory for CACHE_TOKENS?")
            time.sleep(POLL_S)
        return manager


def likeliest(model: PreTrainedModel, prompts: Sequence[Sequence[int]], most: int) -> list[Any]:
    """Return what a passing engine generates after each of `prompts`: tokens, or why none.

    Args:
        model: As the engine would have it.
        prompts: Tokens of each.
        most: How many are to follow.
    """
    room = sum(len(prompt) + most + PAGE_TOKENS for prompt in prompts)
    manager = _manager(model, [], Limits(room, TRIAL_STEP_TOKENS, len(prompts)))
    for number, prompt in enumerate(prompts):
        manager.add_request(list(prompt), str(number), most)
    logging.getLogger(LOGGER).setLevel(logging.CRITICAL)  # a trial may fail
    with torch.inference_mode():
        manager.start()
    manager.stop(block=True)
    logging.getLogger(LOGGER).setLevel(logging.ERROR)
    found: list[Any] = [None] * len(prompts)
    while (output := manager.get_result(timeout=0)) is not None:
        found[int(output.request_id)] = output.error or output.generated_tokens
    return found


def _manager(
    model: PreTrainedModel, ends: Collection[int], limits: Limits
) -> ContinuousBatchingManager:
    return ContinuousBatchingManager(
        model,
        GenerationConfig(do_sample=False, eos_token_id=list(ends) or [-1]),
        ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=-(-limits.cache_tokens // PAGE_TOKENS),
            max_batch_tokens=max(limits.step_tokens, limits.requests),
            max_requests_per_batch=limits.requests,
            use_cuda_graph=False,
            use_async_batching=False,
        ),
    )
