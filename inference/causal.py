"""Load a causal language model, make it fast, and see that it is still right."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from config import Settings as ServerSettings
from inference import linear
from inference.attention import settle
from inference.engine import Engine
from inference.engine import Limits as EngineLimits
from inference.generation import GenerationModel
from inference.joining import join
from inference.prompts import Rules
from inference.sampling import Settings
from inference.sources import Source
from inference.tasks import architectures

logger = logging.getLogger(__name__)

STEP_TOKENS = 512  # of prompts, in one step: those who wait for their next token wait so long
JOIN_TOKENS = 16
HONOURED = frozenset(  # of generation_config.json, and what says nothing about tokens
    ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id")
) | {"bos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "use_cache"}
UNBOUNDED = 1_000_000  # tokenizers state huge limits when they know none


def load(
    source: Source,
    config: PretrainedConfig,
    about: Mapping[str, Any],
    settings: ServerSettings,
) -> GenerationModel:
    """Return the model at `source`.

    Args:
        source: Its files.
        config: Of the model.
        about: Facts for /info; at least device and dtype.
        settings: Of the server.

    Raises:
        ValueError: The weights lack something, or the engine has no use for the model.
    """
    architecture = (config.architectures or ["none"])[0]
    if architecture not in architectures(transformers.AutoModelForCausalLM, config):
        raise ValueError(f"{architecture} is no causal language model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.path, **source.common)
    model = _weights(source, config, about, settings)
    if len(tokenizer) > (rows := _rows(model)):  # one such token would break the engine
        raise ValueError(
            f"the tokenizer knows {len(tokenizer)} words, the model {rows}: do they belong?"
        )
    rules = _rules(model, tokenizer, settings)
    facts = {
        "architecture": type(model).__name__,
        "attention": _made_fast(model, about["dtype"]),
        "context_tokens": rules.context,
        "chat": bool(tokenizer.chat_template),
    }
    step = min(settings.max_batch_tokens, STEP_TOKENS)
    limits = EngineLimits(settings.cache_tokens, step, settings.max_batch_size)
    engine = partial(Engine, model, rules.ends, limits)
    return GenerationModel(tokenizer, engine, rules, {**about, **facts})


def _weights(
    source: Source,
    config: PretrainedConfig,
    about: Mapping[str, Any],
    settings: ServerSettings,
) -> PreTrainedModel:
    dtype = "float32" if about["dtype"] == "int8" else about["dtype"]
    placed = {"device_map": settings.device_map} if settings.device_map else {}
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        source.path,
        config=config,
        output_loading_info=True,
        **{"dtype": dtype, **placed, **source.weights, **settings.model_kwargs},
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"the weights lack {', '.join(missing[:3])}: no causal language model")
    if not placed and not hasattr(model, "hf_quantizer"):
        model.to(about["device"])
    found: PreTrainedModel = model.eval().requires_grad_(False)
    return found


def _rows(model: PreTrainedModel) -> int:
    """Return how many tokens the model knows."""
    return int(model.get_input_embeddings().num_embeddings)


def _made_fast(model: PreTrainedModel, dtype: str) -> str:
    """Make `model` fast, and low in precision where that is wanted; return its attention.

    Raises:
        ValueError: The engine has no use for the model.
    """
    on_cpu = model.device.type == "cpu"
    if on_cpu:
        probe = torch.arange(min(_rows(model), JOIN_TOKENS))[None]
        join(model, lambda: model(probe, use_cache=False).logits)
    if on_cpu and dtype != "int8":
        linear.lay_out(model)
    attention = settle(model)
    if dtype == "int8":
        linear.quantize(model)
    return attention


def _rules(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: ServerSettings
) -> Rules:
    """Return what holds for all texts: the narrower of the model's limits and the server's."""
    context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None and tokenizer.model_max_length < UNBOUNDED:
        context = tokenizer.model_max_length
    return Rules(
        context=context or settings.cache_tokens,
        cache=settings.cache_tokens,
        new=settings.max_new_tokens,
        ends=frozenset(_ends(model, tokenizer)),
        defaults=_defaults(model),
    )


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _defaults(model: PreTrainedModel) -> Settings:
    """Return how the model's own files want tokens to be chosen."""
    given = model.generation_config
    asked = {name for name, value in given.to_diff_dict().items() if value}
    if ignored := sorted(asked - HONOURED):
        logger.warning("generation_config.json: not used: %s", ", ".join(ignored))
    return Settings(
        temperature=(given.temperature or 1.0) if given.do_sample else 0.0,
        top_k=given.top_k or 0 if given.do_sample else 0,
        top_p=given.top_p or 1.0 if given.do_sample else 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
    )
