"""Train the bundled fill-mask model: a small BERT on the glosses and examples of WordNet 3.0.

    python models/train_tiny_fill_mask.py                 # writes models/tiny-fill-mask/

WordNet comes from Debian's package `wordnet-base` (`/usr/share/wordnet`), or from any folder given
by `--wordnet` that holds `data.noun`, `data.verb`, `data.adj` and `data.adv`.

Each synset becomes the sentences "lemma is gloss." and its quoted examples. One synset in fifty is
held out. The model sees whole sentences padded only to their batch; 10 to 30 % of the tokens are
masked anew in every epoch, punctuation never, and the vocabulary projection runs at masked
positions only. Weights are rounded to float16 on disk and load as float32.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import BertWordPieceTokenizer
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    get_cosine_schedule_with_warmup,
    pipeline,
)

SEED = 20
HOLD_OUT_EVERY = 50
PARAGRAPH_SHARE = 0.003
BARE_SHARE = 0.2
MAX_TOKENS = 256
TOKENS_PER_BATCH = 4096
QUOTED = re.compile(r'"([^"]+)"')
MARKER = re.compile(r"\((?:a|p|ip)\)$")
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
HERE = Path(__file__).parent

SHOWN = (
    "Paris is the [MASK] of France.",
    "The dog began to [MASK] at the stranger.",
    "test [MASK]",
)
CARD = """---
language: en
license: other
license_name: wordnet-3.0
license_link: LICENSE
pipeline_tag: fill-mask
library_name: transformers
---
# tiny-fill-mask

A small English BERT for tests and first steps: {parameters:,} parameters, {layers} layers of
{hidden_size}, a lower-case WordPiece vocabulary of {vocab_size:,}, at most {max_tokens} tokens.
Weights are stored as float16 ({size_mb:.1f} MB) and load as float32. It knows what a dictionary
knows and nothing else; do not build on its answers.

Data: the definitions and example sentences of WordNet 3.0 ({synsets:,} synsets; one in
{hold_out_every} held out), from Debian's package `wordnet-base`. WordNet 3.0 Copyright 2006 by
Princeton University; its licence is in `LICENSE`.

Training: `python models/train_tiny_fill_mask.py`, {epochs} epochs of masked language modelling with
seed {seed}, on two CPU cores.

## Accuracy
One random whole word masked in each of {count:,} held-out sentences:

| | top 1 | top 5 |
| --- | --- | --- |
| this model | {model.top_1:.1%} | {model.top_5:.1%} |
| always the most frequent words | {baseline.top_1:.1%} | {baseline.top_5:.1%} |

## Answers
{answers}
"""

Encoded = list[int]


@dataclass(slots=True)
class Synset:
    """One WordNet entry: the definition opened by each of its lemmas, and its examples."""

    definitions: list[str]
    examples: list[str]


@dataclass(slots=True)
class EncodedSynset:
    """A `Synset` as token ids, [CLS] first and [SEP] last."""

    definitions: list[Encoded]
    examples: list[Encoded]


@dataclass(slots=True)
class Accuracy:
    """Share of held-out words found as the first answer, and among the first five."""

    top_1: float
    top_5: float


def read_synsets(folder: Path) -> list[Synset]:
    """Read every synset of the four data files in `folder`, in file order."""
    synsets: list[Synset] = []
    for part in ("noun", "verb", "adj", "adv"):
        lines = (folder / f"data.{part}").read_text(encoding="utf-8", errors="replace").splitlines()
        synsets += [parse_synset(line) for line in lines if not line.startswith("  ")]
    return synsets


def parse_synset(line: str) -> Synset:
    """Parse one line of a WordNet data file (format: wndb(5))."""
    head, _, gloss = line.partition(" | ")
    fields = head.split(" ")
    word_count = int(fields[3], 16)
    lemmas = [MARKER.sub("", word).replace("_", " ") for word in fields[4 : 4 + 2 * word_count : 2]]
    examples = [finish(text) for text in QUOTED.findall(gloss) if len(text.split()) > 1]
    definition = QUOTED.sub("", gloss).partition("; ;")[0].strip(" ;,-")
    return Synset([finish(f"{lemma} is {definition}") for lemma in lemmas], examples)


def finish(text: str) -> str:
    """End `text` with a full stop unless it already ends a sentence."""
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?")) else f"{text}."


def train_tokenizer(synsets: list[Synset], vocab_size: int) -> BertTokenizerFast:
    """Learn a lower-case WordPiece vocabulary of `vocab_size` from the training sentences.

    The trainer breaks ties by the order in which it met the characters, which changes from run to
    run; to name them all in order beforehand makes the vocabulary the same every time.
    """
    wordpiece = BertWordPieceTokenizer(lowercase=True)
    sentences = [text for synset in synsets for text in [synset.definitions[0], *synset.examples]]
    characters = sorted(set(wordpiece.normalizer.normalize_str(" ".join(sentences))) - {" "})
    known = [*SPECIALS, *characters, *(f"##{character}" for character in characters)]
    wordpiece.train_from_iterator(
        sentences, vocab_size=vocab_size, special_tokens=known, show_progress=False
    )
    return BertTokenizerFast(
        vocab=wordpiece.get_vocab(), do_lower_case=True, model_max_length=MAX_TOKENS
    )


def encode(synsets: list[Synset], tokenizer: BertTokenizerFast) -> list[EncodedSynset]:
    """Tokenise all sentences once."""
    texts = [text for synset in synsets for text in synset.definitions + synset.examples]
    ids = iter(tokenizer(texts, truncation=True, max_length=MAX_TOKENS)["input_ids"])
    return [
        EncodedSynset([next(ids) for _ in s.definitions], [next(ids) for _ in s.examples])
        for s in synsets
    ]


def epoch_sentences(synsets: list[EncodedSynset], rng: random.Random) -> list[Encoded]:
    """Pick one definition per synset, all examples, and a few paragraphs.

    The paragraphs teach the late positions.
    """
    sentences = []
    for index, synset in enumerate(synsets):
        for sentence in (rng.choice(synset.definitions), *synset.examples):
            bare = rng.random() < BARE_SHARE  # without its full stop, as people type
            sentences.append([*sentence[:-2], sentence[-1]] if bare else sentence)
        if rng.random() < PARAGRAPH_SHARE:
            sentences.append(paragraph(synsets[index:], rng.randrange(64, MAX_TOKENS)))
    return sentences


def paragraph(synsets: list[EncodedSynset], length: int) -> Encoded:
    """Join neighbouring definitions (WordNet keeps related ones close) up to `length` tokens."""
    first = synsets[0].definitions[0]
    body: Encoded = []
    for synset in synsets:
        if len(body) >= length:
            break
        body.extend(synset.definitions[0][1:-1])
    return [first[0], *body[: length - 2], first[-1]]


def batches(sentences: list[Encoded], rng: random.Random) -> Iterator[list[Encoded]]:
    """Group sentences of similar length, TOKENS_PER_BATCH padded tokens at most; shuffle."""
    ordered = sorted(sentences, key=lambda ids: (len(ids), rng.random()))
    groups: list[list[Encoded]] = [[]]
    for ids in ordered:
        if groups[-1] and (len(groups[-1]) + 1) * len(ids) > TOKENS_PER_BATCH:
            groups.append([])
        groups[-1].append(ids)
    rng.shuffle(groups)
    yield from groups


def pad(group: list[Encoded], pad_id: int) -> torch.Tensor:
    """Return int64 token ids, [sentences, longest]."""
    longest = max(map(len, group))
    return torch.tensor([ids + [pad_id] * (longest - len(ids)) for ids in group])


def masked_logits(
    model: BertForMaskedLM, input_ids: torch.Tensor, masked: torch.Tensor, pad_id: int
) -> torch.Tensor:
    """Return float32 logits [masked tokens, vocabulary] at the true positions of `masked`."""
    hidden = model.bert(
        input_ids=input_ids, attention_mask=(input_ids != pad_id).long()
    ).last_hidden_state
    logits: torch.Tensor = model.cls(hidden[masked])
    return logits.float()


def training_step(
    model: BertForMaskedLM,
    input_ids: torch.Tensor,
    words: torch.Tensor,
    tokenizer: BertTokenizerFast,
) -> torch.Tensor:
    """Mask 10 to 30 % of the words of each sentence, at least one; return their cross entropy.

    `words` tells for every token of the vocabulary whether it may be masked.
    """
    noise = torch.rand(input_ids.shape).masked_fill(~words[input_ids], 2.0)
    rate = 0.1 + 0.2 * torch.rand(len(input_ids), 1)
    masked = (noise < rate) | (noise == noise.min(dim=1, keepdim=True).values) & (noise < 1)
    hidden = masked & (torch.rand(input_ids.shape) < 0.95)
    seen = input_ids.masked_fill(hidden, tokenizer.mask_token_id)
    with torch.autocast("cpu", torch.bfloat16, torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        logits = masked_logits(model, seen, masked, tokenizer.pad_token_id)
    return cross_entropy(logits, input_ids[masked])


def train(
    synsets: list[EncodedSynset], tokenizer: BertTokenizerFast, arguments: argparse.Namespace
) -> BertForMaskedLM:
    """Train from scratch with AdamW and a cosine schedule; return the model in evaluation mode."""
    rng = random.Random(SEED)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden_size // 48,
        intermediate_size=4 * arguments.hidden_size,
        max_position_embeddings=MAX_TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = BertForMaskedLM(config).train()
    model.set_attn_implementation(
        "eager"
    )  # the fused CPU kernel's bfloat16 backward takes 40 % of a step
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.learning_rate, betas=(0.9, 0.98))
    per_epoch = sum(1 for _ in batches(epoch_sentences(synsets, random.Random(SEED)), rng))
    total = per_epoch * arguments.epochs
    schedule = get_cosine_schedule_with_warmup(optimizer, total // 25, total)
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    words = torch.tensor([p.removeprefix("##").isalnum() for p in pieces])
    smoothed = 9.0
    with tqdm(total=total, unit="batch", mininterval=5) as progress:
        for _ in range(arguments.epochs):
            for group in batches(epoch_sentences(synsets, rng), rng):
                loss = training_step(model, pad(group, tokenizer.pad_token_id), words, tokenizer)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                smoothed += 0.01 * (loss.item() - smoothed)
                progress.set_postfix(loss=f"{smoothed:.3f}", refresh=False)
                progress.update()
    return model.eval()


def is_whole_word(tokens: list[str], index: int) -> bool:
    """Tell whether the token at `index` is a word of letters that no other piece continues."""
    following = tokens[index + 1] if index + 1 < len(tokens) else ""
    return tokens[index].isalpha() and not following.startswith("##")


def measure(
    model: BertForMaskedLM,
    held_out: list[EncodedSynset],
    train: list[EncodedSynset],
    tokenizer: BertTokenizerFast,
) -> tuple[Accuracy, Accuracy, int]:
    """Mask one random whole word per held-out sentence.

    Return the model's accuracy, the baseline's, and the number of sentences.

    The baseline answers every mask with the most frequent words of the training sentences.
    """
    rng = random.Random(SEED)
    frequency = Counter(i for s in train for ids in [s.definitions[0], *s.examples] for i in ids)
    words = [t for t, _ in frequency.most_common() if tokenizer.convert_ids_to_tokens(t).isalpha()]
    hits = {1: 0, 5: 0}
    baseline = {1: 0, 5: 0}
    count = 0
    for synset in tqdm(held_out, desc="held out", unit="synset", mininterval=5):
        for ids in [synset.definitions[0], *synset.examples]:
            tokens = tokenizer.convert_ids_to_tokens(ids)
            candidates = [i for i in range(1, len(ids) - 1) if is_whole_word(tokens, i)]
            if not candidates:
                continue
            index = rng.choice(candidates)
            input_ids = torch.tensor([ids])
            input_ids[0, index] = tokenizer.mask_token_id
            with torch.inference_mode():
                logits = masked_logits(
                    model, input_ids, input_ids == tokenizer.mask_token_id, tokenizer.pad_token_id
                )
            best = logits[0].topk(5).indices.tolist()
            count += 1
            for k in (1, 5):
                hits[k] += ids[index] in best[:k]
                baseline[k] += ids[index] in words[:k]
    return (
        Accuracy(hits[1] / count, hits[5] / count),
        Accuracy(baseline[1] / count, baseline[5] / count),
        count,
    )


def save(model: BertForMaskedLM, tokenizer: BertTokenizerFast, folder: Path) -> None:
    """Write weights rounded to float16 and a configuration that loads them as float32."""
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # readable for a server under another user
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n")


def write_card(folder: Path, facts: dict[str, object]) -> None:
    """Write the model card, with the model's own answers to a few sentences."""
    fill_mask = pipeline("fill-mask", model=str(folder), device="cpu")
    answers = (
        f"* `{text}` {', '.join(row['token_str'] for row in fill_mask(text))}" for text in SHOWN
    )
    config = fill_mask.model.config
    card = CARD.format(
        parameters=fill_mask.model.num_parameters(),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_tokens=MAX_TOKENS,
        size_mb=(folder / "model.safetensors").stat().st_size / 1e6,
        hold_out_every=HOLD_OUT_EVERY,
        seed=SEED,
        answers="\n".join(answers),
        **facts,
    )
    (folder / "README.md").write_text(card)


def main() -> None:
    """Train, measure, save, and fill in the model card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"))
    parser.add_argument("--output", type=Path, default=HERE / "tiny-fill-mask")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    torch.manual_seed(SEED)
    synsets = read_synsets(arguments.wordnet)
    kept = [s for i, s in enumerate(synsets) if i % HOLD_OUT_EVERY]
    tokenizer = train_tokenizer(kept, arguments.vocab_size)
    train_set = encode(kept, tokenizer)
    held_out = encode(synsets[::HOLD_OUT_EVERY], tokenizer)
    model = train(train_set, tokenizer, arguments)
    save(model, tokenizer, arguments.output)
    model = BertForMaskedLM.from_pretrained(arguments.output)
    accuracy, baseline, count = measure(model.eval(), held_out, train_set, tokenizer)
    facts = {
        "model": accuracy,
        "baseline": baseline,
        "count": count,
        "synsets": len(synsets),
        "epochs": arguments.epochs,
    }
    write_card(arguments.output, facts)
    print((arguments.output / "README.md").read_text())


if __name__ == "__main__":
    main()
