"""The memory of the device that a model runs on. Runs in the model thread."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping

import torch

logger = logging.getLogger(__name__)

FRAGMENTED = 0.3  # of the reserved memory; beyond, the allocator gives back what nothing uses
NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "out of memory")


class DeviceMemory:
    """The memory of a device (see `stages.Memory`).

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
        if self._is_cuda:
            torch.cuda.empty_cache()

    def tidy(self) -> None:
        """Give fragmented memory back."""
        ratio = self.usage().get("gpu_memory_fragmentation_ratio", 0)
        if ratio > FRAGMENTED:
            torch.cuda.empty_cache()
            logger.info("GPU memory was fragmented (%.0f %%): cache emptied", ratio * 100)
