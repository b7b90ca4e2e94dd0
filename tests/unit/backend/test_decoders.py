"""Decoders of transformers, with the cache that their forward creates, as one graph on OpenVINO."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchserve_openvino as tov
from helpers import TOLERANCE

transformers = pytest.importorskip("transformers")


def _rotary(name: str, **more: object) -> Callable[[int], nn.Module]:
    def make(head_dim: int) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            hidden_size=2 * head_dim, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=head_dim, vocab_size=1000, max_position_embeddings=512, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, **more,
        )  # fmt: skip
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def _gpt(name: str, head: str, **more: object) -> Callable[[int], nn.Module]:
    def make(head_dim: int) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            n_embd=2 * head_dim, n_layer=1, n_head=2, vocab_size=1000, n_positions=512, **more
        )
        return getattr(transformers, head)(config)

    return make


DECODERS = {
    "llama": _rotary("Llama"),
    "phi3": _rotary("Phi3"),
    "gpt2": _gpt("GPT2", "GPT2LMHeadModel"),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_that_makes_its_cache_is_one_partition(name: str, head_dim: int, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = DECODERS[name](head_dim).eval()
    ids, mask = torch.randint(3, 1000, (2, 33)), torch.ones(2, 33, dtype=torch.int64)
    mask[0, 20:] = 0
    compiled = tov.compile(model, dynamic=dynamic)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
    with torch.no_grad():
        expected, got = model(**inputs), compiled(**inputs)
    open_rows, tolerance = mask.bool(), TOLERANCE[torch.float32]
    torch.testing.assert_close(got.logits[open_rows], expected.logits[open_rows], rtol=tolerance, atol=tolerance)
    (ours,), (theirs,) = got.past_key_values.layers, expected.past_key_values.layers
    for mine, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance, check_stride=True)
    summary = compiled.report.summary
    assert (summary.coverage, summary.partitions) == (1.0, 1), compiled.report.to_text()
