"""A GPTQ checkpoint over REST, from its folder to the text of the model that it stands for."""

from pathlib import Path

import httpx
import pytest
from test_text_generation import package
from torchserve_process import TorchServeProcess

from chat_models import PROMPTS, language_model, text_of, tokenizer
from language_models import greedy
from quantized_folders import Packing, save_quantized


@pytest.mark.slow
def test_a_gptq_checkpoint_is_served_as_it_is(server: TorchServeProcess, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(language_model(tmp_path / "plain"))
    model = save_quantized(tmp_path / "gptq", plain, Packing(symmetric=False, act_order=True))
    tokenizer().save_pretrained(tmp_path / "gptq")
    # No --config-file: the template's `weights: auto`.
    package(server, tmp_path / "gptq", "gptq", "--precompile")
    generate = server.describe("gptq")["generate"]
    assert generate["weights"] == "gptq-int4" and generate["compression"]["layers"] == {"f32": 2, "u4": 14}
    assert generate["passed"] and generate["model_from_cache"] and generate["dynamic_quantization"] is False
    for prompt in PROMPTS[:4]:
        asked = {"prompt": prompt, "max_tokens": 12}
        answer = httpx.post(f"{server.inference_url}/predictions/gptq", json=asked, timeout=60).json()
        wanted = greedy(model, tokenizer()(prompt)["input_ids"], 12)
        assert text_of(wanted[: answer["generated_tokens"]]) == answer["text"]
    assert httpx.delete(f"{server.management_url}/models/gptq", timeout=60).status_code == 200
