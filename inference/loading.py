"""Find a model, see that it is whole, load it and warm it up. Runs in the model thread."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.pipelines.base import Pipeline

from config import Settings
from errors import LoadError
from inference import causal, engine, ladder, linear, stacking
from inference.classification import (
    TextClassification,
    TokenClassification,
    ZeroShotClassification,
)
from inference.embedding import FeatureExtraction, read_config
from inference.examples import examples
from inference.fill_mask import FillMask
from inference.joining import join
from inference.memory import bound_arenas
from inference.pipeline import PipelineModel, max_input_tokens
from inference.sources import Source, source_of
from inference.stacking import Stacked
from inference.tasks import pipeline_of, task_of
from inference.text import TextTask
from inference.whole import OneByOne
from model import Generator, Model

logger = logging.getLogger(__name__)

LOGGERS = ("transformers", "huggingface_hub", engine.LOGGER)
REASON_CHARACTERS = 300
SWITCH_INTERVAL_S = 0.0001
TEXT_TASKS: dict[str, Callable[[Pipeline], TextTask]] = {
    "fill-mask": FillMask,
    "text-classification": TextClassification,
    "token-classification": TokenClassification,
    "zero-shot-classification": ZeroShotClassification,
}


def load(settings: Settings) -> Model | Generator:
    """Load the model named in `settings` and warm it up.

    Raises:
        LoadError: The model is not there, is not whole, does not serve a known task, or fails on
            the warm-up.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for library in LOGGERS:  # their lines, in our format, once
        logging.getLogger(library).handlers.clear()
        logging.getLogger(library).propagate = True
    logging.getLogger(engine.LOGGER).setLevel(logging.ERROR)
    torch.set_num_threads(settings.num_threads)
    # Between two operators the model needs the interpreter for some µs; in the default 5 ms the
    # event loop would handle a dozen requests before it lets go of it.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    bound_arenas()
    try:
        model = _load(settings)
        model.memory.reclaim()
    except Exception as error:
        logger.debug("loading failed", exc_info=error)
        reason = " ".join(str(error).split())[:REASON_CHARACTERS] or type(error).__name__
        if "safetensors" in reason and not settings.allow_pickle:
            reason += " (ALLOW_PICKLE=true loads pickled weights too: only if you trust them)"
        raise LoadError(f"cannot load model {settings.model_id!r}: {reason}") from error
    logger.info("serving %s", ", ".join(f"{name}={fact}" for name, fact in model.info.items()))
    return model


def _load(settings: Settings) -> Model | Generator:
    source = source_of(settings)
    config = transformers.AutoConfig.from_pretrained(source.path, **source.common)
    task = settings.task or task_of(config)
    device = _device(settings.device)
    dtype = _dtype(settings.dtype, device, config)
    about: dict[str, Any] = {
        "model_id": settings.model_id,
        "revision": settings.revision,
        "task": task,
        "dtype": dtype,
        "device": device,
    }
    if task == "text-generation":
        return causal.load(source, config, about, settings)
    pipeline = pipeline_of(task, source, device, config)
    about |= {"architecture": type(pipeline.model).__name__, "device": str(pipeline.device)}
    if task in TEXT_TASKS or task == "feature-extraction":
        return _text_model(pipeline, source, about, settings)
    return _whole_model(pipeline, about)


def _whole_model(pipeline: Pipeline, about: dict[str, Any]) -> Model:
    """Return a model that stacks inputs, if that is right for it."""
    pipeline.model.requires_grad_(False)
    tries = examples(pipeline)
    facts: dict[str, Any] = {"path": "one by one", "refused": {}}
    if pipeline.task in stacking.TASKS:
        facts = stacking.proved(pipeline, tries)
    logger.info(
        "inputs run %s", "; not ".join(map(str, (facts["path"], *facts["refused"].items())))
    )
    if about["dtype"] == "int8":
        linear.quantize(pipeline.model)
    elif about["dtype"] != "float32":
        pipeline.model.to(getattr(torch, about["dtype"]))
    kind = Stacked if facts["path"] == "stacked" else OneByOne
    model = kind(pipeline, {**about, "batching": facts})
    model.warm_up(tries)
    return model


def _text_model(
    pipeline: Pipeline, source: Source, about: dict[str, Any], settings: Settings
) -> PipelineModel:
    """Return a model that packs texts, if packing is right for it."""
    words = len(pipeline.tokenizer)
    rows = pipeline.model.get_input_embeddings().num_embeddings
    if not rows / 2 < words <= rows:
        raise ValueError(f"the tokenizer knows {words} words, the model {rows}: do they belong?")
    max_tokens = max_input_tokens(pipeline)
    task: TextTask
    if pipeline.task == "feature-extraction":
        embedding = read_config(source.file)
        max_tokens = min(filter(None, (max_tokens, embedding.max_tokens)), default=None)
        task = FeatureExtraction(pipeline, embedding)
    else:
        task = TEXT_TASKS[pipeline.task](pipeline)
    rung = _rung(pipeline, about["dtype"], task.everywhere, max_tokens)
    facts = {**about, **task.about}
    model = PipelineModel(task, rung, max_tokens, settings.max_batch_tokens, facts)
    model.warm_up()
    return model


def _rung(pipeline: Pipeline, dtype: str, everywhere: bool, max_tokens: int | None) -> ladder.Rung:
    """Make the model as fast as it can be made in `dtype`, and prove that it is still right.

    It comes in float32, and which way of batching is right for it shows there: in a lower precision
    rounding would hide the traces of a wrong one.
    """
    model = pipeline.model.requires_grad_(False)
    wanted = ladder.first_middle_last if everywhere else ladder.first
    probes = ladder.make_probes(pipeline.tokenizer, max_tokens, wanted)
    reference = ladder.answers(ladder.untouched(model), probes)
    on_cpu = model.device.type == "cpu"
    if dtype == "int8":  # in other precisions nothing is won by it
        join(model, lambda: ladder.answers(ladder.untouched(model), probes[1:2]))
    if dtype == "float32" and on_cpu:
        linear.lay_out(model)
    rung = ladder.climb(model, probes, reference)
    if dtype != "float32":
        if dtype == "int8":
            linear.quantize(model)
        else:
            linear.cast(model, getattr(torch, dtype))
            if on_cpu:
                linear.lay_out(model)
        rung = ladder.check_close(rung, probes, reference, dtype)
    return ladder.as_graph(rung, probes)


def _dtype(name: str, device: str, config: PretrainedConfig) -> str:
    """Return the precision to compute in.

    Raises:
        ValueError: The device cannot compute in it.
    """
    if name == "int8" and device != "cpu":
        raise ValueError("dtype int8 is for the CPU")
    if name != "auto":
        return name
    stored = str(config.dtype).removeprefix("torch.")
    return stored if device != "cpu" and stored in ladder.CLOSE else "float32"


def _device(name: str) -> str:
    if name != "auto":
        return name
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"
