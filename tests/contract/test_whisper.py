"""What generation/speech relies on in transformers' Whisper: names, arguments, and how ``generate`` calls the model."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperForConditionalGeneration, WhisperTokenizer
from transformers.models.whisper.modeling_whisper import WhisperAttention, WhisperDecoder, WhisperDecoderLayer
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from speech_models import tokenizer, whisper
from torchserve_openvino.generation.speech.speech_model import language_names, pipeline_text, prompt_ids
from torchserve_openvino.generation.speech.stand_in import CompiledWhisper


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = whisper(tmp_path_factory.mktemp("whisper"))
    return WhisperForConditionalGeneration.from_pretrained(folder).eval()


def test_generate_takes_what_it_is_given() -> None:
    taken = set(inspect.signature(WhisperForConditionalGeneration.generate).parameters)
    assert taken >= {
        "input_features", "attention_mask", "return_timestamps", "task", "language", "prompt_ids", "temperature",
        "logits_processor", "return_segments", "return_dict_in_generate", "monitor_progress",
    }  # fmt: skip


def test_the_stand_in_takes_what_the_model_takes() -> None:
    ours, theirs = (
        set(inspect.signature(kind.forward).parameters) for kind in (CompiledWhisper, WhisperForConditionalGeneration)
    )
    # What is missing is never passed by ``generate``.
    assert theirs - ours <= {"decoder_inputs_embeds", "labels", "kwargs"}
    assert "cache" in theirs


def test_the_decoder_is_made_of_what_its_graph_calls(model: Any) -> None:
    (layer, _) = model.model.decoder.layers
    assert isinstance(layer, WhisperDecoderLayer) and isinstance(layer.self_attn, WhisperAttention)
    assert set(dict(layer.named_children())) == {
        "self_attn", "self_attn_layer_norm", "activation_fn", "encoder_attn", "encoder_attn_layer_norm", "fc1", "fc2",
        "final_layer_norm",
    }  # fmt: skip
    assert set(dict(layer.self_attn.named_children())) == {"k_proj", "v_proj", "q_proj", "out_proj"}
    assert isinstance(model.model.decoder, WhisperDecoder)
    assert set(dict(model.model.decoder.named_children())) == {
        "embed_tokens", "embed_positions", "layers", "layer_norm",
    }  # fmt: skip


def test_generate_asks_the_cache_that_a_step_returned(model: Any) -> None:
    calls: list[Any] = []
    forward = model.forward

    def watched(**given: Any) -> Any:
        calls.append(given)
        return forward(**given)

    model.forward = watched
    try:
        # transformers looks for names of arguments.
        watched.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        with torch.no_grad():
            model.generate(torch.zeros(1, 20, 200), language="en", max_new_tokens=3, return_timestamps=True)
    finally:
        del model.forward
    first, *later = calls
    assert first["decoder_input_ids"].shape[1] > 1 and first["cache"].get_seq_length() >= 0
    assert all(each["decoder_input_ids"].shape[1] == 1 for each in later) and len(later) >= 1
    assert all("encoder_outputs" in each and each.get("decoder_attention_mask") is None for each in calls)


def test_the_tokenizers_own_way_to_chunks() -> None:
    words = tokenizer()
    first = words.convert_tokens_to_ids("<|0.00|>")
    tokens = [first, 1, 2, first + 10, first + 10, 3, first + 20]
    assert pipeline_text(words, tokens, True, 0.02) == (
        "abc",
        [{"text": "ab", "timestamp": [0.0, 0.2]}, {"text": "c", "timestamp": [0.2, 0.4]}],
    )
    assert pipeline_text(words, tokens, False, 0.02) == ("abc", None)
    assert pipeline_text(words, [], True, 0.02) == ("", [])
    assert set(inspect.signature(WhisperTokenizer._decode_asr).parameters) >= {
        "model_outputs", "return_timestamps", "return_language", "time_precision",
    }  # fmt: skip


def test_prompts_and_languages() -> None:
    words = tokenizer()
    assert prompt_ids(words, "ab") == [words.convert_tokens_to_ids("<|startofprev|>"), 0, 1, 2]
    with pytest.raises(ValueError, match="special token"):
        prompt_ids(words, "a <|en|>")
    assert language_names() == LANGUAGES and LANGUAGES["de"] == "german"
