"""The memory of the device that a model runs on. Runs in the model thread."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress

import torch

logger = logging.getLogger(__name__)

FRAGMENTED = 0.3  # of the reserved memory; beyond, the allocator gives back what nothing uses
M_ARENA_MAX = -8  # of mallopt
ARENAS = 2
NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "out of memory")


def bound_arenas() -> None:
    """Have threads share glibc's arenas: with one each, memory that one frees is lost to others."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


class DeviceMemory:
    """The memory of a device (see `model.Memory`).

    Args:
        device: As torch names it.
    """

    def __init__(self, device: str) -> None:
        self._is_cuda = device.startswith("cuda")
        self._device = device

    def usage(self) -> Mapping[str, float]:
        """Return bytes by the name of their gauge; nothing where there is no GPU."""
        if not self._is_cuda:
            return {}
        allocated = torch.cuda.memory_allocated(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        return {
            "gpu_memory_allocated_bytes": allocated,
            "gpu_memory_reserved_bytes": reserved,
            "gpu_memory_fragmentation_ratio": (reserved - allocated) / reserved if reserved else 0,
        }

    @staticmethod
    def is_short(error: BaseException) -> bool:
        """Tell whether `error` says that there was not enough memory."""
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)

    def release(self, error: BaseException) -> None:
        """Let go of what the call that ended in `error` still holds."""
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        self._empty()

    def reclaim(self) -> None:
        """Free what nobody refers to any more, and keep the collector off all the rest.

        A full collection of a loaded model would hold every request up for 0.2 s.
        """
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._empty()

    def _empty(self) -> None:
        """Give the system back what nothing uses."""
        if self._is_cuda:
            torch.cuda.empty_cache()
        elif sys.platform == "linux":
            with suppress(AttributeError):
                ctypes.CDLL(None).malloc_trim(0)

    def tidy(self) -> None:
        """Give fragmented memory back."""
        ratio = self.usage().get("gpu_memory_fragmentation_ratio", 0)
        if ratio > FRAGMENTED:
            torch.cuda.empty_cache()
            logger.info("GPU memory was fragmented (%.0f %%): cache emptied", ratio * 100)
