"""The memory of a device; that of a GPU as torch would tell of it."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import weakref

import pytest
import torch

from inference.memory import DeviceMemory
from tests.processes import ROOT


def test_short_memory_of_a_cpu_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert DeviceMemory.is_short(caught.value)
    assert DeviceMemory.is_short(torch.OutOfMemoryError("CUDA out of memory."))
    assert DeviceMemory.is_short(MemoryError())


def test_other_errors_are_not_short_memory() -> None:
    assert not DeviceMemory.is_short(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not DeviceMemory.is_short(ValueError("out of memory, says the input"))


def test_what_a_failed_call_held_is_let_go() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def forward() -> None:
        large = torch.ones(1000)
        held.append(weakref.ref(large))
        try:
            raise RuntimeError("first")
        except RuntimeError as error:
            raise MemoryError from error

    try:
        forward()
    except MemoryError as error:
        kept = error
    gc.collect()
    assert held[0]() is not None
    DeviceMemory("cpu").release(kept)
    assert held[0]() is None


@pytest.mark.parametrize(("allocated", "emptied"), [(75, 0), (65, 1), (0, 1)])
def test_fragmented_memory_of_a_gpu_is_given_back(
    allocated: int, emptied: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    memory = DeviceMemory("cuda:0")
    assert memory.usage()["gpu_memory_fragmentation_ratio"] == (100 - allocated) / 100
    memory.tidy()
    assert len(calls) == len(caplog.records) == emptied


def test_a_cpu_has_nothing_to_tidy() -> None:
    memory = DeviceMemory("cpu")
    memory.tidy()
    assert memory.usage() == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "None")],
)
def test_segments_of_a_gpu_may_grow_unless_the_user_chose(
    given: dict[str, str], expected: str
) -> None:
    code = (
        "import os, config; config.prepare_allocator(); print(os.environ.get('PYTORCH_ALLOC_CONF'))"
    )
    environment = {"PATH": os.environ["PATH"], **given}
    output = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment)
    assert output.decode().strip() == expected
