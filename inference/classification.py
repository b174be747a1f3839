"""Classification of texts and of their tokens, with the pipelines' own postprocessing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from errors import Rejected
from inference.blocks import Encoded
from inference.text import PerInputTask, PreparedInput, Stages, Text


class TextClassification(PerInputTask):
    """Labels for a text, or for a pair of texts, sent as {"text", "text_pair"}."""

    @property
    def about(self) -> Mapping[str, Any]:
        """The labels that it gives."""
        return {"labels": list(self.pipeline.model.config.id2label.values())}

    def texts(self, value: Any, _parameters: Mapping[str, Any]) -> Sequence[Text]:
        """Return the text or the pair."""
        return [value if isinstance(value, str) else (value["text"], value["text_pair"])]

    def answer(self, prepared: PreparedInput, outputs: Sequence[torch.Tensor]) -> Any:
        """Return [{"label", "score"}, …], the best first."""
        parameters = {"_legacy": False, **prepared.parameters}
        return self.pipeline.postprocess({"logits": outputs[0]}, **parameters)


class TokenClassification(PerInputTask):
    """Entities in a text; one that is too long is cut, or with `stride` read in pieces."""

    truncation = ""
    everywhere = True
    MARKS = ("special_tokens_mask", "offset_mapping")

    @property
    def about(self) -> Mapping[str, Any]:
        """The labels that it gives."""
        return {"labels": list(self.pipeline.model.config.id2label.values())}

    def stages(self, parameters: Mapping[str, Any]) -> Stages:
        """Let the pipeline sort them, and always truncate."""
        given = super().stages(parameters)
        tokenizer: dict[str, Any] = {
            "truncation": True,
            "return_special_tokens_mask": True,
            "return_offsets_mapping": self.tokenizer.is_fast,
        }
        if "tokenizer_params" in given.tokenizer:
            if 2 * parameters["stride"] > self.tokenizer.model_max_length:
                raise Rejected("parameters.stride: pieces may overlap by half, not by more")
            tokenizer |= {"return_overflowing_tokens": True, "stride": parameters["stride"]}
        return Stages({}, tokenizer, given.answer)

    def encoded(self, features: Mapping[str, Any], _parameters: Mapping[str, Any]) -> Encoded:
        """Keep what tells tokens from characters."""
        marks = {name: features.get(name) for name in self.MARKS}
        inputs = {name: values for name, values in features.items() if name not in self.MARKS}
        return Encoded(inputs, range(len(inputs["input_ids"])), marks)

    def answer(self, prepared: PreparedInput, outputs: Sequence[torch.Tensor]) -> Any:
        """Return [{"entity", "score", "index", "word", "start", "end"}, …]."""
        chunks = []
        for encoded, logits in zip(prepared.sequences, outputs, strict=True):
            offsets = encoded.marks["offset_mapping"]
            chunks.append(
                {
                    "logits": logits[None],
                    "sentence": prepared.value,
                    "input_ids": torch.tensor([encoded.features["input_ids"]]),
                    "offset_mapping": None if offsets is None else torch.tensor([offsets]),
                    "special_tokens_mask": torch.tensor([encoded.marks["special_tokens_mask"]]),
                }
            )
        entities = self.pipeline.postprocess(chunks, **prepared.parameters)
        return [entity | {"score": float(entity["score"])} for entity in entities]


class ZeroShotClassification(PerInputTask):
    """Labels that the client makes up: each becomes a hypothesis about the text."""

    truncation = ""

    @property
    def example(self) -> tuple[Any, Mapping[str, Any]]:
        """A text and its candidates."""
        return "warm up", {"candidate_labels": ["sport", "weather"]}

    def stages(self, parameters: Mapping[str, Any]) -> Stages:
        """Let the pipeline sort them; what is cut is the text, never the hypothesis."""
        stages = super().stages(parameters)
        labels = {"labels": stages.tokenizer["candidate_labels"]}
        return Stages(stages.tokenizer, {"truncation": "only_first"}, labels | {**stages.answer})

    def texts(self, value: Any, parameters: Mapping[str, Any]) -> Sequence[Text]:
        """Return the text with each hypothesis."""
        template = parameters.get("hypothesis_template", "This example is {}.")
        try:
            pairs, _ = self.pipeline._args_parser(value, parameters["candidate_labels"], template)
        except (ValueError, LookupError, AttributeError) as error:
            raise Rejected(f"parameters.hypothesis_template: {error}") from None
        return [(text, hypothesis) for text, hypothesis in pairs]

    def answer(self, prepared: PreparedInput, outputs: Sequence[torch.Tensor]) -> Any:
        """Return {"sequence", "labels", "scores"}, the best first."""
        parameters = dict(prepared.parameters)
        chunks = [
            {"candidate_label": label, "sequence": prepared.value, "logits": logits}
            for label, logits in zip(parameters.pop("labels"), outputs, strict=True)
        ]
        return self.pipeline.postprocess(chunks, **parameters)
