"""The section `handler.openvino.generate`."""

from typing import Any

import pytest

from torchserve_openvino.config import load_serving_config
from torchserve_openvino.errors import ConfigError


def loaded(**section: Any) -> Any:
    return load_serving_config({"handler": {"openvino": {"generate": section}}}).openvino.generate


def test_defaults_are_exact() -> None:
    found = loaded()
    assert (found.engine, found.weights, found.kv_cache, found.dynamic_quantization) == (None, "auto", None, False)
    assert (found.computation, found.cached) == ("f32", "f32")
    assert found.max_length is None and found.cache_gb is None and found.proof_prompts == ()


def test_bf16_is_cached_as_it_is_computed() -> None:
    assert loaded(weights="bf16").cached == "bf16" and loaded(weights="bf16", kv_cache="u8").cached == "u8"
    assert loaded(weights="int8").cached == "f32"


def test_values() -> None:
    found = loaded(weights="int4", group_size=-1, proof_prompts=["Once upon a time"], cache_gb=0.5, max_length=8192)
    assert (found.weights, found.group_size, found.cache_gb) == ("int4", -1, 0.5)
    assert found.proof_prompts == ("Once upon a time",)


def test_prefixes_are_shared_unless_tokens_are_guessed() -> None:
    assert loaded().shares_prefixes and not loaded(prefix_caching=False).shares_prefixes
    assert not loaded(prompt_lookup_tokens=4).shares_prefixes
    assert not loaded(prompt_lookup_tokens=4, prefix_caching=False).shares_prefixes


BAD: list[tuple[dict[str, Any], str]] = [
    ({"weights": "int2"}, "generate.weights"),
    ({"kv_cache": "int8"}, "generate.kv_cache"),
    ({"kv_cache": "bf16"}, "kv_cache: bf16 does not go with weights: auto, .* set kv_cache: f32 or u8"),
    ({"weights": "bf16", "kv_cache": "f32"}, "kv_cache: f32 does not go with weights: bf16"),
    ({"engine": "vllm"}, "generate.engine"),
    ({"max_token": 5}, "generate.max_token: .*Did you mean 'max_tokens'"),
    ({"max_tokens": 0}, "generate.max_tokens"),
    ({"max_tokens": 64, "max_length": 64}, r"max_tokens \(64\) must be less than max_length \(64\)"),
    ({"group_size": 64}, "group_size belongs to weights: int4, not auto"),
    ({"weights": "int4", "group_size": 0}, "group_size must be -1 or at least 1, not 0"),
    ({"cache_gb": 0}, "generate.cache_gb"),
    ({"prefix_caching": "yes"}, "generate.prefix_caching: .*true or false"),
    ({"prompt_lookup_tokens": 33}, "generate.prompt_lookup_tokens"),
    ({"prompt_lookup_tokens": True}, "generate.prompt_lookup_tokens"),
    ({"prompt_lookup_tokens": 4, "prefix_caching": True}, "prompt_lookup_tokens does not go with prefix_caching"),
    ({"prompt_lookup_tokens": 8, "step_tokens": 8}, r"\(8\) must be less than step_tokens \(8\)"),
]


@pytest.mark.parametrize(("section", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_a_bad_value_is_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(**section)
