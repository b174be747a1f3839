"""The models that the benchmarks serve: BERT of two shapes, random weights from a fixed seed.

    python -m benchmarks.models tiny base  # writes .benchmarks/models/tiny and …/base

Speed depends on the shape, not on what a model knows. The tokenizer is that of the bundled model,
its vocabulary filled up with words that never occur to the 30,522 of BERT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".benchmarks" / "models"
SEED = 3
VOCABULARY = 30_522
SHAPES = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
}


def sentences() -> list[str]:
    """Return 500 English sentences with one mask each: 7 to 127 tokens, median 20, mean 26."""
    return Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()


def model_folder(shape: str) -> Path:
    """Return the folder of the model of `shape`, made on the first call."""
    folder = FOLDER / shape
    if not (folder / "config.json").exists():
        _tokenizer().save_pretrained(folder)
        torch.manual_seed(SEED)
        sizes = SHAPES[shape]
        config = BertConfig(
            vocab_size=VOCABULARY, intermediate_size=4 * sizes["hidden_size"], **sizes
        )
        BertForMaskedLM(config).save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    bundled = ROOT / "models" / "tiny-fill-mask"
    state = json.loads((bundled / "tokenizer.json").read_text(encoding="utf-8"))
    state |= {"truncation": None, "padding": None}
    words = state["model"]["vocab"]
    words |= {f"[unused{number}]": number for number in range(len(words), VOCABULARY)}
    settings = json.loads((bundled / "tokenizer_config.json").read_text(encoding="utf-8"))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        model_max_length=512,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{name: word for name, word in settings.items() if name.endswith("_token")},
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or SHAPES:
        sys.stdout.write(f"{model_folder(name)}\n")
