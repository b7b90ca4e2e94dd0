"""What generation.compiled relies on in transformers: how `generate` treats caches, masks and encoders."""

import inspect
from typing import Any

import pytest
import torch

from language_models import prompts, seq2seq, tiny

pytest.importorskip("transformers")


def test_generate_goes_on_with_the_cache_that_the_first_call_returned() -> None:
    model = tiny("llama")
    forward, seen = model.forward, []

    def watched(**kwargs: Any) -> Any:
        seen.append((kwargs["cache"], kwargs["attention_mask"].shape[-1]))
        found = forward(**kwargs)
        if len(seen) == 1:
            found.cache = type(found.cache)(config=model.config)
            forward(**{**kwargs, "cache": found.cache})
        return found

    watched.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = watched
    ids, mask = torch.tensor(prompts(5)), torch.tensor([[0, 1, 1, 1, 1]])
    model.generate(ids, attention_mask=mask, max_new_tokens=4, pad_token_id=0, eos_token_id=None)
    first, *others = [cache for cache, _ in seen]
    assert len(others) == 3 and all(cache is others[0] for cache in others) and others[0] is not first
    assert [length for _, length in seen] == [5, 6, 7, 8], "masks of a cache that grows come as they are"


def test_generate_asks_the_model_for_its_encoder() -> None:
    model = seq2seq("t5")
    encoder, calls = model.get_encoder(), []

    class Watched:
        forward = encoder.forward

        def __call__(self, **kwargs: Any) -> Any:
            calls.append(set(kwargs))
            return encoder(**kwargs)

    model.get_encoder = lambda modality=None: Watched()
    model.generate(torch.tensor(prompts(5)), attention_mask=torch.tensor([[1, 1, 1, 1, 0]]), max_new_tokens=2)
    assert len(calls) == 1 and {"input_ids", "attention_mask"} <= calls[0]


def test_t5_adds_to_scores_what_depends_on_the_distance_only() -> None:
    attention = seq2seq("t5").decoder.block[0].layer[0].SelfAttention
    assert hasattr(attention, "relative_attention_bias") and attention.is_decoder
    whole = attention.compute_bias(30, 30)
    for place in (0, 7, 29):
        assert torch.equal(whole[:, :, place], attention.compute_bias(1, 30, past_seen_tokens=place)[:, :, 0])
    assert torch.equal(whole[:, :, 20, 10], whole[:, :, 15, 5])


def test_a_compileable_cache_is_masked_behind_its_tokens() -> None:
    from transformers.cache_utils import Cache, CacheLayerMixin
    from transformers.masking_utils import create_causal_mask

    assert "layers" in inspect.signature(Cache.__init__).parameters
    assert CacheLayerMixin.__abstractmethods__ <= {
        "lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length", "get_max_cache_shape",
    }  # fmt: skip
    from torchserve_openvino.generation.compiled.caches import CachePositions, in_graph

    config = tiny("llama").config
    own = [torch.zeros(1, 2, 6, 8) for _ in range(4)]
    cache = in_graph(own, None, 2, CachePositions(torch.tensor(3), 1, 6))
    mask = create_causal_mask(config, torch.zeros(1, 1, 32), torch.ones(1, 6, dtype=torch.int64), cache)
    assert mask.tolist() == [[[[True] * 4 + [False] * 2]]]


@pytest.mark.parametrize(
    "given",
    [
        {}, {"max_new_tokens": 4}, {"max_length": 9}, {"max_length": 9, "max_new_tokens": 2},
        {"settings": {"max_length": 8}},
        {"settings": {"max_new_tokens": 3}, "max_length": 30}, {"config": {"max_length": 11}},
        {"config": {"max_new_tokens": 5}, "max_new_tokens": 1},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_how_many_tokens_a_call_of_generate_makes(kind: str, given: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    from torchserve_openvino.generation.compiled.arguments import Arguments

    model = seq2seq(kind) if kind == "t5" else tiny(kind)
    model.generation_config.update(**given.get("settings", {}), eos_token_id=None, forced_eos_token_id=None)
    call = {name: value for name, value in given.items() if name in {"max_new_tokens", "max_length"}}
    if "config" in given:
        call["generation_config"] = GenerationConfig(**given["config"], pad_token_id=0)
    ids = torch.tensor(prompts(5))
    arguments = Arguments(model, type(model).generate)
    most, _ = arguments._total(arguments.named((ids,), call), 1 if kind == "t5" else 5)
    # An end of text would be taken for an early end.
    found = model.generate(ids, min_length=most, **call)
    assert found.shape[1] == most
