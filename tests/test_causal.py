"""What a causal language model's own files say is kept, or said not to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from inference import causal
from tests.tiny_causal import saved_causal


def test_what_the_models_files_ask_for_in_vain_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved_causal(tmp_path)
    wanted = {"no_repeat_ngram_size": 3, "do_sample": True, "temperature": 0.6, "top_k": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(wanted))
    model = AutoModelForCausalLM.from_pretrained(folder)
    defaults = causal._defaults(model)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 7, 1.0)
    assert "not used: no_repeat_ngram_size" in caplog.text


def test_a_plain_model_is_greedy_and_has_nothing_to_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved_causal(tmp_path))
    assert causal._defaults(model).temperature == 0
    assert "not used" not in caplog.text
