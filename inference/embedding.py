"""Embeddings: the vectors of a text's tokens pooled into one, as the model's own files say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.pipelines.base import Pipeline

from errors import Rejected
from inference.text import PerInputTask, PreparedInput, Stages

KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers
POOLINGS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda vectors: vectors.mean(0),
    "cls": lambda vectors: vectors[0],
    "max": lambda vectors: vectors.amax(0),
    "lasttoken": lambda vectors: vectors[-1],
    "mean_sqrt_len": lambda vectors: vectors.sum(0) / len(vectors) ** 0.5,
}


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How a model wants its embeddings made.

    Attributes:
        pooling: A key of POOLINGS.
        normalize: To length one.
        max_tokens: Of a text; None: as many as the model takes.
        lower_case: Texts are put into lower case.
        prompts: What is put before a text, by name.
        prompt_name: Of the prompt that is put before every text.
    """

    pooling: str = "mean"
    normalize: bool = False
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt_name: str | None = None


def read_config(read: Callable[[str], str | None]) -> EmbeddingConfig:
    """Read what sentence-transformers keeps beside a model; without it, the mean of the tokens.

    Args:
        read: Returns the path of a file of the model, or None.

    Raises:
        ValueError: The model needs more than pooling and normalising.
    """

    def values(name: str) -> Any:
        path = read(name)
        return json.loads(Path(path).read_text(encoding="utf-8")) if path else {}

    prompting = values("config_sentence_transformers.json")
    limits = values("sentence_bert_config.json")
    modules = values("modules.json") or []
    kinds = {module["type"].rsplit(".", 1)[-1]: module["path"] for module in modules}
    if unknown := [kind for kind in kinds if kind not in KNOWN_MODULES]:
        raise ValueError(f"its embeddings need a module that is not served: {unknown[0]}")
    pooling = values(f"{kinds['Pooling']}/config.json") if "Pooling" in kinds else {}
    return EmbeddingConfig(
        pooling=_pooling(pooling),
        normalize="Normalize" in kinds,
        max_tokens=limits.get("max_seq_length"),
        lower_case=limits.get("do_lower_case", False),
        prompts=prompting.get("prompts") or {},
        prompt_name=prompting.get("default_prompt_name"),
    )


def _pooling(config: Mapping[str, Any]) -> str:
    """Return the one way of pooling that `config` names.

    Raises:
        ValueError: There are several, or one that is not served.
    """
    named = config.get("pooling_mode")
    if named is None:
        named = [
            name.removeprefix("pooling_mode_")
            for name, used in config.items()
            if name.startswith("pooling_mode_") and used is True
        ] or "mean"
    modes = [named] if isinstance(named, str) else list(named)
    modes = [mode.removesuffix("_tokens").removesuffix("_token") for mode in modes]
    if len(modes) != 1 or modes[0] not in POOLINGS or config.get("include_prompt") is False:
        raise ValueError(f"its embeddings are pooled in a way that is not served: {modes}")
    return modes[0]


class FeatureExtraction(PerInputTask):
    """One vector for each text, or on request the vectors of its tokens.

    Args:
        pipeline: Of the task.
        config: Of the model's embeddings.
    """

    truncation = "set parameters.truncate to true to cut it"
    everywhere = True

    def __init__(self, pipeline: Pipeline, config: EmbeddingConfig) -> None:
        super().__init__(pipeline)
        self._config = config

    @property
    def about(self) -> Mapping[str, Any]:
        """How vectors are made, and how long they are."""
        return {
            "dimensions": self.pipeline.model.config.hidden_size,
            "pooling": self._config.pooling,
            "normalize": self._config.normalize,
            "prompts": list(self._config.prompts),
        }

    def stages(self, parameters: Mapping[str, Any]) -> Stages:
        """Sort `parameters` by stage: truncate goes to the tokenizer.

        Raises:
            Rejected: The model's vectors are shorter than asked for.
        """
        width = self.pipeline.model.config.hidden_size
        if parameters.get("dimensions", width) > width:
            raise Rejected(f"parameters.dimensions: the model has {width}")
        rest = {name: value for name, value in parameters.items() if name != "truncate"}
        return Stages(rest, {"truncation": parameters.get("truncate", False)}, rest)

    def texts(self, value: Any, parameters: Mapping[str, Any]) -> Sequence[str]:
        """Return the text behind its prompt.

        Raises:
            Rejected: The model has no prompt of that name.
        """
        if self._config.lower_case:
            value = value.lower()
        name = parameters.get("prompt_name", self._config.prompt_name)
        if name is None:
            return [value]
        if name not in self._config.prompts:
            known = ", ".join(self._config.prompts) or "none"
            raise Rejected(f"parameters.prompt_name: this model knows {known}")
        return [self._config.prompts[name] + value]

    def answer(self, prepared: PreparedInput, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the vector, a list of float; or one for each token."""
        pooling = prepared.parameters.get("pooling", self._config.pooling)
        vectors = outputs[0] if pooling == "none" else POOLINGS[pooling](outputs[0])
        vectors = vectors[..., : prepared.parameters.get("dimensions")]
        if prepared.parameters.get("normalize", self._config.normalize and pooling != "none"):
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return vectors.tolist()
