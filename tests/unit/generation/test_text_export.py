"""Exported language models compute what eager PyTorch does, for batches, padding, and one token after the other."""

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from torch import nn

from language_models import VOCABULARY, each_kind, prompts, tiny
from torchserve_openvino.backend.upstream._openvino_private import core
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.generation.text.expected import logits
from torchserve_openvino.generation.text.exporting.architecture import USUAL_LENGTH, length_of
from torchserve_openvino.generation.text.exporting.artifact import (
    as_folder,
    fields_of,
    folder_digest,
    load,
    model_path,
)
from torchserve_openvino.generation.text.exporting.exported_language_model import CacheShape, export
from torchserve_openvino.generation.text.exporting.weights import compressed

pytest.importorskip("transformers")
pytest.importorskip("openvino_genai")
F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def started(model: ov.Model | Path) -> ov.InferRequest:
    return core().compile_model(model, "CPU", F32).create_infer_request()


@each_kind
def test_logits_of_a_padded_batch_and_of_the_tokens_after_it(kind: str, served: Any, exports: Store) -> None:
    folder, model, _ = served(kind)
    found = load(exports, fields_of(folder_digest(folder), GenerateSection()))
    assert found is not None
    with as_folder(found[0]) as place:
        request = started(model_path(place))
    long, short = prompts(9, 4)
    ids = torch.tensor([long, [0] * 5 + short])
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    got = logits(request, ids.numpy(), mask.numpy())
    kept = mask.bool().numpy()
    np.testing.assert_allclose(got[kept], wanted.numpy()[kept], rtol=1e-4, atol=1e-4)
    everything = ids
    for _ in range(3):
        ids = wanted[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], -1)
        everything = torch.cat([everything, ids], -1)
        with torch.no_grad():
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            wanted = model(input_ids=everything, attention_mask=mask, position_ids=positions).logits
        got = logits(request, ids.numpy(), mask.numpy())
        np.testing.assert_allclose(got[:, -1], wanted[:, -1].numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_facts_of_the_exported_model() -> None:
    found = export(tiny("llama"))
    assert found.layers == (CacheShape(2, 8, 8),) * 2
    assert found.vocabulary == VOCABULARY and found.operators > 20
    names = {name for port in found.model.inputs for name in port.get_names()}
    assert names >= {"input_ids", "attention_mask", "position_ids", "beam_idx"}


class Recurrent(nn.Module):
    """Takes the right arguments, but caches nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.config = tiny("llama").config

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        raise ValueError("this model needs no cache")


def test_a_model_without_a_cache_of_keys_and_values_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="Recurrent does not keep keys and values .*needs no cache"):
        export(Recurrent())


def test_a_model_without_sdpa_is_refused() -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM does not support .*only eager"):
        export(model)


@pytest.mark.slow
def test_an_operator_without_conversion_is_named() -> None:
    model = tiny("llama")
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: plain(torch.special.bessel_j0(x))
    with pytest.raises(ModelLoadError, match="bessel_j0"):
        export(model)


class TestLengths:
    def test_what_the_model_was_made_for(self) -> None:
        assert length_of(tiny("llama").config, None) == 512
        assert length_of(tiny("gpt2").config, 100) == 100
        assert length_of(tiny("llama", max_position_embeddings=10**6).config, None) == USUAL_LENGTH

    def test_longer_than_learned_positions(self) -> None:
        with pytest.raises(ModelLoadError, match=r"max_length is 513, but opt was made for 512 tokens.*512 or less"):
            length_of(tiny("opt").config, 513)

    def test_a_sliding_window_bounds_the_length(self) -> None:
        config = tiny("mistral").config
        assert length_of(config, None) == 256 and length_of(config, 256) == 256
        with pytest.raises(ModelLoadError, match=r"257, but mistral sees only the last 256 tokens \(sliding_window\)"):
            length_of(config, 257)
        assert length_of(tiny("qwen2", sliding_window=8).config, 512) == 512, "qwen2 does not use it by default"

    def test_positions_that_depend_on_the_length(self) -> None:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        config = tiny("llama", rope_parameters=rope).config
        config.original_max_position_embeddings = 64
        with pytest.raises(ModelLoadError, match=r"beyond 64 tokens \(dynamic\)"):
            length_of(config, 65)

    def test_other_attention(self) -> None:
        import transformers

        with pytest.raises(ModelLoadError, match="t5 has an encoder"):
            length_of(transformers.T5Config(), None)
        with pytest.raises(ModelLoadError, match="attn_logit_softcapping"):
            length_of(transformers.Gemma2Config(), None)


class TestCompression:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("weights", "types"), [("int8", {"i8", "u8"}), pytest.param("int4", {"i4", "u4"}, marks=pytest.mark.slow)]
    )
    def test_constants_have_the_format(self, weights: str, types: set[str]) -> None:
        pytest.importorskip("nncf")
        model, how = compressed(export(tiny("llama", hidden_size=64)).model, weights, None)  # type: ignore[arg-type]
        found = {op.get_element_type().get_type_name() for op in model.get_ops() if op.get_type_name() == "Constant"}
        assert found & types
        # The rows of one layer have 48 values.
        assert how == ({} if weights == "int8" else {"group_size": 16, "ratio": 1.0})
        started(model)

    def test_f32_stays_as_it_is(self) -> None:
        model = export(tiny("gpt2")).model
        assert compressed(model, "f32", None) == (model, {})
