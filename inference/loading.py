"""Find a model, see that it is whole, load it and warm it up. Runs in the model thread."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import transformers
from transformers.pipelines.base import Pipeline

from config import Settings
from errors import LoadError
from inference.pipeline import PipelineModel

logger = logging.getLogger(__name__)

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
    try:
        model = PipelineModel(_pipeline(settings), settings)
        model.warm_up()
    except Exception as error:
        logger.debug("loading failed", exc_info=error)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise LoadError(f"cannot load model {settings.model_id!r}: {reason}") from error
    logger.info("serving %s", ", ".join(f"{name}={fact}" for name, fact in model.info.items()))
    return model


def _pipeline(settings: Settings) -> Pipeline:
    source = _source(settings.model_id)
    common = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    device = _device(settings.device)
    config = transformers.AutoConfig.from_pretrained(source, **common)
    task = settings.task or _task(config)
    model, loading = MODEL_OF_TASK[task].from_pretrained(
        source,
        config=config,
        dtype="float32" if settings.dtype == "auto" and device == "cpu" else settings.dtype,
        output_loading_info=True,
        **common,
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"the weights lack {', '.join(missing[:3])}: not a model for {task}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **common)
    words, rows = len(tokenizer), model.get_input_embeddings().num_embeddings
    if not rows / 2 < words <= rows:
        raise ValueError(f"the tokenizer knows {words} words, the model {rows}: do they belong?")
    return transformers.pipeline(task, model=model, tokenizer=tokenizer, device=device)


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


def _device(name: str) -> str:
    if name != "auto":
        return name
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"
