"""Small random models and a tokenizer, built on the fly."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

WORDS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "one", "two", "three", "four", "five"]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 300,
    "pad_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "bert": {},
    "big_bird": {"attention_type": "original_full"},
    "camembert": {},
    "convbert": {"embedding_size": 16},
    "data2vec-text": {},
    "deberta": {},
    "deberta-v2": {},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "electra": {"embedding_size": 16},
    "ernie": {},
    "esm": {"mask_token_id": 4, "position_embedding_type": "rotary"},
    "eurobert": {"num_key_value_heads": 2},
    "fnet": {},
    "gte": {},
    "ibert": {},
    "jina_embeddings_v3": {},
    "layoutlm": {},
    "megatron-bert": {},
    "mobilebert": {
        "embedding_size": 32,
        "true_hidden_size": 32,
        "intra_bottleneck_size": 32,
        "bottleneck_size": 32,
    },
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "mpnet": {},
    "nomic_bert": {},
    "nystromformer": {},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "roberta": {},
    "roberta-prelayernorm": {},
    "roformer": {},
    "xlm-roberta": {},
}


def tiny_model(family: str, auto: Any = AutoModelForMaskedLM, **sizes: Any) -> PreTrainedModel:
    """Return a model of `family` with random weights."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family] | sizes)
    model: PreTrainedModel = auto.from_config(config).eval().requires_grad_(False)
    return model


def word_tokenizer(limit: int | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows a few words, with RoBERTa's special tokens."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
    special |= {"unk_token": "<unk>", "mask_token": "<mask>"}
    limits = {} if limit is None else {"model_max_length": limit}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **limits)
