"""Small causal language models with random weights, and a tokenizer of bytes and pairs of bytes."""

from __future__ import annotations

from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<pad>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}


def byte_tokenizer(words: int, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: every text has its tokens, and all tokens in turn are
    bytes, often of no character.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(islice(product(alphabet, alphabet), words - len(SPECIAL) - len(alphabet)))
    vocabulary = [*SPECIAL, *alphabet, *map("".join, merges)]
    model = models.BPE({word: number for number, word in enumerate(vocabulary)}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = template
    return fast


def saved_causal(
    folder: Path,
    *,
    kind: str = "llama",
    words: int = 600,
    template: str | None = TEMPLATE,
    **sizes: Any,
) -> str:
    """Save a random model, by default a Llama, and its tokenizer; return the folder."""
    tokenizer = byte_tokenizer(words, template)
    torch.manual_seed(4)
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = AutoConfig.for_model(kind, vocab_size=words, **special, **SIZES | sizes)
    model = AutoModelForCausalLM.from_config(config)
    for weights in model.parameters():
        if weights.dim() > 1:  # far enough from zero that texts differ
            torch.nn.init.normal_(weights, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
