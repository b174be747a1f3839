"""Fill-mask: how much one input may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.pipelines.base import Pipeline

from errors import Rejected

DEFAULT_TOP_K = 5  # of FillMaskPipeline
MAX_ANSWERS = 1000  # per input; they are decoded one by one while its batch mates wait


def check_answers(
    pipeline: Pipeline, input_ids: torch.Tensor, parameters: Mapping[str, Any]
) -> None:
    """Bound the answers that `parameters` (of postprocessing) ask for.

    Args:
        pipeline: A fill-mask pipeline.
        input_ids: Token ids of one input, int64 [1, tokens].
        parameters: May hold top_k and target_ids.

    Raises:
        Rejected: There are not so many words, or it would be more than MAX_ANSWERS.
    """
    top_k = parameters.get("top_k", DEFAULT_TOP_K)
    choices = len(parameters.get("target_ids", range(len(pipeline.tokenizer))))
    if top_k > choices and "target_ids" not in parameters:
        raise Rejected(f"parameters.top_k: the vocabulary has {choices} words")
    masks = int((input_ids == pipeline.tokenizer.mask_token_id).sum())
    answers = masks * min(top_k, choices)
    if answers > MAX_ANSWERS:
        raise Rejected(
            f"parameters.top_k: {masks} masks ask for {answers} answers, and {MAX_ANSWERS} fit"
        )
