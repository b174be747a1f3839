"""Find a model, see that it is whole, load it and warm it up. Runs in the model thread."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path

import torch
import transformers
from transformers.pipelines.base import Pipeline

from config import Settings
from errors import LoadError
from inference import ladder, linear
from inference.joining import join
from inference.pipeline import PipelineModel, max_input_tokens

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0001
ROOT = Path(__file__).parent.parent
TASK_OF_ARCHITECTURE = {"ForMaskedLM": "fill-mask"}
MODEL_OF_TASK = {"fill-mask": transformers.AutoModelForMaskedLM}


def load(settings: Settings) -> PipelineModel:
    """Load the model named in `settings` and warm it up.

    Raises:
        LoadError: The model is not there, is not whole, does not serve a known task, or fails on
            the warm-up.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for library in ("transformers", "huggingface_hub"):  # their lines, in our format, once
        logging.getLogger(library).handlers.clear()
        logging.getLogger(library).propagate = True
    torch.set_num_threads(settings.num_threads)
    # Between two operators the model needs the interpreter for some µs; in the default 5 ms the
    # event loop would handle a dozen requests before it lets go of it.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        pipeline, dtype = _pipeline(settings)
        model = PipelineModel(pipeline, _rung(pipeline, dtype), dtype, settings)
        model.warm_up()
        gc.collect()
        gc.freeze()  # a full collection of all that was loaded would hold every request up 0.2 s
    except Exception as error:
        logger.debug("loading failed", exc_info=error)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise LoadError(f"cannot load model {settings.model_id!r}: {reason}") from error
    logger.info("serving %s", ", ".join(f"{name}={fact}" for name, fact in model.info.items()))
    return model


def _pipeline(settings: Settings) -> tuple[Pipeline, str]:
    """Return the pipeline in float32, and the precision that it is to get."""
    source = _source(settings.model_id)
    common = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    device = _device(settings.device)
    config = transformers.AutoConfig.from_pretrained(source, **common)
    task = settings.task or _task(config)
    dtype = _dtype(settings.dtype, device, config)
    model, loading = MODEL_OF_TASK[task].from_pretrained(
        source,
        config=config,
        dtype="float32",
        output_loading_info=True,
        **common,
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"the weights lack {', '.join(missing[:3])}: not a model for {task}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **common)
    words, rows = len(tokenizer), model.get_input_embeddings().num_embeddings
    if not rows / 2 < words <= rows:
        raise ValueError(f"the tokenizer knows {words} words, the model {rows}: do they belong?")
    return transformers.pipeline(task, model=model, tokenizer=tokenizer, device=device), dtype


def _rung(pipeline: Pipeline, dtype: str) -> ladder.Rung:
    """Make the model as fast as it can be made in `dtype`, and prove that it is still right.

    It comes in float32, and which way of batching is right for it shows there: in a lower precision
    rounding would hide the traces of a wrong one.
    """
    model = pipeline.model.requires_grad_(False)
    words = len(pipeline.tokenizer)
    probes = ladder.make_probes(pipeline.tokenizer, words, max_input_tokens(pipeline))
    reference = ladder.answers(ladder.untouched(model), probes)
    on_cpu = model.device.type == "cpu"
    join(model, lambda: ladder.answers(ladder.untouched(model), probes))
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


def _source(model_id: str) -> str:
    """Return the folder of a local model, or the id of a hub model."""
    for folder in (Path(model_id), ROOT / model_id):
        if folder.is_dir():
            return str(folder)
    if model_id.startswith((".", "/", "~")):
        raise ValueError("there is no such folder")
    return model_id


def _task(config: transformers.PretrainedConfig) -> str:
    """Tell the task from the architecture that the weights were saved with."""
    architecture = (config.architectures or ["an unnamed architecture"])[0]
    for ending, task in TASK_OF_ARCHITECTURE.items():
        if architecture.endswith(ending):
            return task
    raise ValueError(f"no task is known for {architecture}; served: {', '.join(MODEL_OF_TASK)}")


def _dtype(name: str, device: str, config: transformers.PretrainedConfig) -> str:
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
