"""GPTQ and AWQ checkpoints in the engine: the tokens of the dequantized model, from weights that stay packed."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import openvino as ov
import pytest
import torch
from engines import answers, opened, settings
from safetensors.torch import load_file, save_file

from language_models import greedy, prompts, tiny
from quantized_folders import Packing, configure, save_quantized
from torchserve_openvino.backend.upstream._openvino_private import core
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.errors import ConfigError, ModelLoadError
from torchserve_openvino.generation.text import making
from torchserve_openvino.generation.text.engine import Sampling
from torchserve_openvino.generation.text.exporting.artifact import as_folder, fields_of, folder_digest, load, model_path
from torchserve_openvino.quantized.scheme import scheme_of
from torchserve_openvino.serving.loading.hub import load_config, load_model, read_config
from torchserve_openvino.serving.loading.packed import load_dequantized

pytest.importorskip("transformers")
pytest.importorskip("openvino_genai")
# All rows of linear layers are multiples of 32 long, as AutoGPTQ demands.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
SIZES = {"head_dim": 16, "intermediate_size": 64}
PACKINGS = {
    "gptq act-order": ("llama", Packing(act_order=True, symmetric=False)),
    "gptq_v2": ("llama", Packing(form="gptq_v2", symmetric=False)),
    "gptq 8 bits": ("llama", Packing(bits=8)),
    "gptq whole rows, lm_head": ("llama", Packing(group_size=-1, skip=())),
    "gptq some layers": ("llama", Packing(skip=("lm_head", "up_proj", "o_proj"))),
    "awq": ("qwen2", Packing("awq", symmetric=False)),
    "Conv1D": ("gpt2", Packing(symmetric=False)),
}
# The one of the quick suite; the tests share its folder and what is exported of it.
SHARED = "gptq act-order"
each_packing = pytest.mark.parametrize(
    "name", [each if each == SHARED else pytest.param(each, marks=pytest.mark.slow) for each in PACKINGS]
)


def saved(folder: Path, name: str) -> Any:
    kind, packing = PACKINGS[name]
    return save_quantized(folder, tiny(kind, **(SIZES if kind != "gpt2" else {})), packing)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("packed")
    return folder, saved(folder, SHARED)


@pytest.fixture
def folder(checkpoint: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint[0], tmp_path / "model"))


def as_it_is(folder: Path, store: Store, place: Path, form: str) -> ov.Model:
    """The stored model, and its weights' file in ``place``."""
    found = load(store, fields_of(folder_digest(folder), GenerateSection(), form))
    assert found is not None
    with as_folder(found[0]) as stored:
        shutil.copyfile(model_path(stored).with_suffix(".bin"), place / "model.bin")
        return core().read_model(model_path(stored), model_path(stored).with_suffix(".bin"))


@pytest.mark.slow
@each_packing
def test_tokens_are_those_of_the_dequantized_model(
    name: str, checkpoint: tuple[Path, Any], exports: Store, tmp_path: Path
) -> None:
    packing = PACKINGS[name][1]
    folder, model = checkpoint if name == SHARED else (tmp_path / "model", saved(tmp_path / "model", name))
    found = opened(folder, exports)
    given = prompts(3, 40, 17, 1)
    got = answers(found.engine, given, Sampling(24, ignore_eos=True))
    found.engine.close()
    assert [each[0] for each in got] == [greedy(model, prompt, 24) for prompt in given]
    facts, form = found.facts, f"{packing.method}-int{packing.bits}"
    assert facts["weights"] == form and facts["dynamic_quantization"] is False
    assert facts["properties"]["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == "0"
    # The proof is that of f32: each token, and the least cosine of the logits.
    assert facts["passed"] and facts["first_difference"] is None and facts["tokens_compared"] == 4 * 24
    assert facts["logits"]["least_cosine"] > 0.9999
    count = sum(_is_packed(each, layer, packing) for each, layer in model.named_modules())
    layers, names = facts["compression"]["layers"], facts["compression"]["names"]
    if name == SHARED:
        assert names["f32"] == ["lm_head", "model.embed_tokens"] and len(names["u4"]) == 7
        assert "model.layers.*.self_attn.q_proj" in names["u4"]
    assert layers[f"u{packing.bits}"] == count and facts["compression"]["group_size"] == packing.group_size
    stored = as_it_is(folder, exports, tmp_path, form)
    _check_size(stored, tmp_path / "model.bin", model, packing)
    runtime = core().compile_model(stored, "CPU", EXACT).get_runtime_model()
    kernels = [
        node.input(1).get_source_output().get_node().get_rt_info()["outputPrecisions"].astype(str)
        for node in runtime.get_ordered_ops()
        if node.get_rt_info()["layerType"].astype(str) == "FullyConnected"
    ]
    assert kernels.count(f"u{packing.bits}") == count


def _check_size(exported: ov.Model, weights: Path, model: Any, packing: Packing) -> None:
    """Packed weights take their bits, and little more for scales and zero points; they are not there twice."""
    sizes: dict[str, int] = {}
    for operation in exported.get_ops():
        if operation.get_type_name() == "Constant":
            kind = operation.get_element_type()
            count = math.prod(operation.get_output_shape(0))
            sizes[kind.get_type_name()] = sizes.get(kind.get_type_name(), 0) + -(-count * kind.bitwidth // 8)
    everything = sum(weight.numel() for weight in model.parameters())
    inside = sum(
        layer.weight.numel() for name, layer in model.named_modules() if _is_packed(name, layer, packing)
    )  # fmt: skip
    form = f"u{packing.bits}"
    assert inside * packing.bits / 8 <= sizes[form] <= inside * packing.bits / 8 * (1 + 1 / 16)
    # A scale for each group of at least 32; tied weights may be there twice.
    assert sizes["f32"] <= 4 * (2 * (everything - inside) + inside / 32) + 2048
    assert weights.stat().st_size <= sum(sizes.values())


def _is_packed(name: str, layer: Any, packing: Packing) -> bool:
    linear = isinstance(layer, torch.nn.Linear) or type(layer).__name__ == "Conv1D"
    return linear and name.rpartition(".")[2] not in packing.skip


@pytest.mark.slow
def test_a_warm_start_does_not_unpack(checkpoint: Any, exports: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = checkpoint
    cold = opened(folder, exports)
    cold.engine.close()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("must not run")

    for name in ("export", "expect", "nearness", "load_model", "compressed", "pack_linears", "Checkpoint"):
        monkeypatch.setattr(making, name, refuse)
    warm = opened(folder, exports)
    (prompt,) = prompts(9)
    assert answers(warm.engine, [prompt], Sampling(8, ignore_eos=True)) == [[greedy(model, prompt, 8)]]
    warm.engine.close()
    varying = {"model_from_cache", "proof_from_cache", "seconds", "process"}
    assert warm.facts["model_from_cache"] and warm.facts["proof_from_cache"]
    assert {k: v for k, v in warm.facts.items() if k not in varying} == {
        k: v for k, v in cold.facts.items() if k not in varying
    }


def test_what_the_checkpoint_says_is_part_of_the_key(folder: Path) -> None:
    def fields(**section: Any) -> dict[str, Any]:
        return making.Making(settings(folder, **section), None)._fields

    before = fields()
    assert before["weights"] == "gptq-int4" and fields(weights="f32")["weights"] == "f32"
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    configure(folder, quantization_config={**config, "checkpoint_format": "gptq_v2"})
    assert fields() != before


@pytest.mark.slow
def test_dequantized_weights_are_f32(checkpoint: Any, exports: Store) -> None:
    folder, model = checkpoint
    found = opened(folder, exports, weights="f32")
    (prompt,) = prompts(9)
    assert answers(found.engine, [prompt], Sampling(8, ignore_eos=True)) == [[greedy(model, prompt, 8)]]
    found.engine.close()
    assert found.facts["weights"] == "f32" and found.facts["compression"]["layers"].keys() == {"f32"}


@pytest.mark.slow
def test_quantized_inputs_are_said_and_proven_less_strictly(checkpoint: Any, exports: Store) -> None:
    found = opened(checkpoint[0], exports, dynamic_quantization=True, verify={"on_violation": "warn"})
    found.engine.close()
    assert found.facts["dynamic_quantization"] is True
    assert "DYNAMIC_QUANTIZATION_GROUP_SIZE" not in found.facts["properties"]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_packed_weights_are_not_rounded_again(folder: Path, weights: str) -> None:
    with pytest.raises(ConfigError, match=rf"generate.weights: is {weights}, but .* 4 bits already .*gptq.*Set auto"):
        opened(folder, weights=weights)


def test_an_unsupported_format_is_refused_before_anything_loads(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "aqlm", "bits": 2})
    with pytest.raises(ModelLoadError, match="quant_method is 'aqlm'; supported: gptq, awq"):
        opened(folder)
    with pytest.raises(ModelLoadError, match="quant_method is 'aqlm'"):
        load_model(folder, "AutoModelForCausalLM")


class TestLoading:
    """What other tasks and eager PyTorch get: the model in float32."""

    def test_weights_are_those_that_the_checkpoint_stands_for(self, checkpoint: Any) -> None:
        folder, model = checkpoint
        found = load_model(folder, "AutoModelForCausalLM")
        state, wanted = found.state_dict(), model.state_dict()
        assert state.keys() == wanted.keys() and not hasattr(found.config, "quantization_config")
        assert all(state[name].dtype == torch.float32 and torch.equal(state[name], wanted[name]) for name in wanted)
        ids = torch.tensor([[5, 6, 7]])
        # Where weights lie in memory decides the last digits.
        torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)

    def test_the_generation_config_comes_along(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "repetition_penalty": 1.5}))
        found = load_model(folder, "AutoModelForCausalLM").generation_config
        assert (found.eos_token_id, found.repetition_penalty) == ([2, 7], 1.5)

    def test_the_bare_model_and_other_tasks(self, checkpoint: Any, tmp_path: Path) -> None:
        from transformers import LlamaForSequenceClassification

        wanted = checkpoint[1].model.state_dict()
        found = load_model(checkpoint[0], "AutoModel").state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        classifier = LlamaForSequenceClassification(checkpoint[1].config).eval()
        model = save_quantized(tmp_path, classifier, Packing("awq", symmetric=False, skip=("score",)))
        found = load_model(tmp_path, "AutoModelForSequenceClassification").state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())

    def test_square_weights_by_column(self, tmp_path: Path) -> None:
        model = saved(tmp_path, "Conv1D")
        wanted = model.state_dict()
        found = load_model(tmp_path, "AutoModelForCausalLM").state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def change(self, folder: Path, **tensors: torch.Tensor | None) -> None:
        found = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            found.pop(name, None)
            if tensor is not None:
                found[name] = tensor
        save_file(found, folder / "model.safetensors")

    LAYER = "model.layers.0.self_attn.q_proj"

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            ({f"{LAYER}.qzeros": None}, f"{LAYER}.qzeros is missing"),
            ({f"{LAYER}.scales": torch.ones(1, 5)}, f"{LAYER}.scales has shape"),
            ({f"{LAYER}.bias": torch.ones(64)}, f"{LAYER}.bias of the checkpoint is not 0 throughout"),
            ({"lm_head.weight": None}, "no weights for lm_head.weight"),
            ({"model.layers.0.mlp.act.scales": torch.full((3,), 2.0)}, "act.scales of the checkpoint is not 1"),
            ({"model.layers.7.mlp.up_proj.qweight": torch.ones(8, 8)}, "no linear layer model.layers.7.mlp.up_proj"),
        ],
        ids=["part", "size", "bias", "missing", "scaled", "unknown"],
    )
    def test_what_does_not_fit_is_named(self, folder: Path, tensors: dict[str, Any], message: str) -> None:
        self.change(folder, **tensors)
        with pytest.raises(ModelLoadError, match=message):
            load_model(folder, "AutoModelForCausalLM")

    def test_a_layer_of_another_size_is_refused(self, folder: Path) -> None:
        configure(folder, intermediate_size=32)
        with pytest.raises(ModelLoadError, match="weights of another shape for model.layers.0.mlp.down_proj.weight"):
            load_model(folder, "AutoModelForCausalLM")

    def test_a_packed_last_layer_is_not_tied_to_the_embeddings(self, tmp_path: Path) -> None:
        model = saved(tmp_path, "gptq whole rows, lm_head")
        configure(tmp_path, tie_word_embeddings=True)
        found = load_model(tmp_path, "AutoModelForCausalLM").state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())

    def test_a_layer_with_the_weight_of_another_is_refused(self, folder: Path) -> None:
        from transformers import LlamaForCausalLM

        class Shares(LlamaForCausalLM):
            @classmethod
            def from_config(cls, config: Any) -> Any:
                return cls(config)

            @classmethod
            def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
                model, info = super().from_pretrained(*args, **kwargs)
                first, second = model.model.layers
                second.mlp.up_proj.weight = first.mlp.up_proj.weight
                return model, info

        config, scheme = load_config(folder), scheme_of(read_config(folder))
        assert scheme is not None
        with pytest.raises(ModelLoadError, match=r"layers.1.mlp.up_proj is packed, but the model takes another weight"):
            load_dequantized(folder, scheme, config, Shares, {"output_loading_info": True})

    def test_biases_of_zero_and_scales_of_one_do_not_matter(self, folder: Path) -> None:
        self.change(folder, **{f"{self.LAYER}.bias": torch.zeros(64), "model.layers.0.mlp.act.scales": torch.ones(3)})
        load_model(folder, "AutoModelForCausalLM")
