"""GPTQ and AWQ tensors are read as their definition says, or refused with the field or the layer that does not fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from quantized_folders import Numbers, Packing, packed, quantized, words
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.quantized.checkpoint import Checkpoint
from torchserve_openvino.quantized.formats import read
from torchserve_openvino.quantized.layer import packed as packed_bytes
from torchserve_openvino.quantized.layer import unpacked
from torchserve_openvino.quantized.scheme import Scheme, scheme_of

PACKINGS = {
    "gptq": Packing(),
    "gptq asymmetric": Packing(symmetric=False),
    "gptq_v2": Packing(form="gptq_v2"),
    "gptq_v2 asymmetric": Packing(form="gptq_v2", symmetric=False, group_size=16),
    "act-order": Packing(act_order=True, symmetric=False),
    "act-order, short last group": Packing(act_order=True, group_size=48),
    "whole rows": Packing(group_size=-1),
    "8 bits": Packing(bits=8),
    "8 bits, v2, asymmetric, act-order": Packing(bits=8, form="gptq_v2", symmetric=False, act_order=True),
    "bfloat16 scales": Packing(scales=torch.bfloat16, symmetric=False),
    "float32 scales": Packing(scales=torch.float32),
    "awq": Packing("awq", symmetric=False),
    "awq whole rows": Packing("awq", symmetric=False, group_size=-1),
    "awq symmetric": Packing("awq"),
    "awq without zero points": Packing("awq", with_zeros=False),
}


def scheme(packing: Packing) -> Scheme:
    found = scheme_of({"quantization_config": packing.config()})
    assert found is not None
    return found


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_a_layer_is_read_exactly(packing: Packing) -> None:
    numbers = quantized(torch.randn(16, 96), packing)
    layer = read("layer", packed(numbers, packing), scheme(packing))
    assert layer.values.tolist() == numbers.values and layer.zero_points.tolist() == numbers.zeros
    assert torch.equal(torch.from_numpy(layer.dequantized()), numbers.weight())
    blocked = layer.blocked()
    order = np.arange(96) if blocked.order is None else blocked.order
    centered = blocked.values.astype(np.float32) - blocked.zero_points[..., None].astype(np.float32)
    weight = (centered * blocked.scales[..., None].astype(np.float32)).reshape(16, 96)
    assert np.array_equal(weight, layer.dequantized()[:, order])
    assert (blocked.order is not None) == packing.act_order


def test_groups_are_in_order_without_g_idx() -> None:
    parts = packed(quantized(torch.randn(8, 96), PACKINGS["gptq"]), PACKINGS["gptq"])
    with_groups = read("layer", parts, scheme(PACKINGS["gptq"])).dequantized()
    del parts["g_idx"]
    assert np.array_equal(read("layer", parts, scheme(PACKINGS["gptq"])).dequantized(), with_groups)


def random_layer(bits: int, zeros: list[int]) -> Numbers:
    values = torch.randint(0, 2**bits, (len(zeros), 32), generator=torch.Generator().manual_seed(0)).tolist()
    return Numbers(values, [[zero] for zero in zeros], torch.ones(len(zeros), 1, dtype=torch.float16), [0] * 32)


@given(st.sampled_from([4, 8]), st.data())
def test_packing_is_undone(bits: int, data: Any) -> None:
    per = 32 // bits
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    numbers = data.draw(
        st.lists(
            st.integers(0, 2**bits - 1), min_size=shape[0] * shape[1] * per, max_size=shape[0] * shape[1] * per
        )
    )  # fmt: skip
    values = np.array(numbers, dtype=np.uint8).reshape(shape[0], shape[1] * per)
    made = [[sum(int(row[w * per + i]) << bits * i for i in range(per)) for w in range(shape[1])] for row in values]
    assert np.array_equal(unpacked(words(made).numpy(), bits), values)
    # The same bits as OpenVINO's: low ones first.
    assert packed_bytes(values, bits).tobytes() == words(made).numpy().astype("<i4").tobytes()


@given(st.sampled_from([4, 8]), st.lists(st.integers(0, 15), min_size=8, max_size=8))
def test_zero_points_of_all_writers(bits: int, zeros: list[int]) -> None:
    """The second format has them as they are; GPTQModel subtracts from whole words; others can't store 0 in between."""
    numbers, second = random_layer(bits, zeros), Packing(bits=bits, form="gptq_v2")
    parts = packed(numbers, second)
    assert read("layer", parts, scheme(second)).zero_points[:, 0].tolist() == zeros
    per = 32 // bits
    ones = sum(1 << bits * place for place in range(per))
    borrowed = [(int(word) % 2**32 - ones) % 2**32 for word in parts["qzeros"][0]]
    parts["qzeros"] = words([borrowed])
    by_gptqmodel = scheme(Packing(bits=bits, extra={"meta": {"quantizer": ["gptqmodel:1.4.5"]}}))
    assert read("layer", parts, by_gptqmodel).zero_points[:, 0].tolist() == zeros
    parts["qzeros"] = words([[sum((z - 1) % 2**bits << bits * i for i, z in enumerate(zeros[w * per : w * per + per]))
                              for w in range(8 // per)]])  # fmt: skip
    other = scheme(Packing(bits=bits))
    if any(zero == 0 and place % per != per - 1 for place, zero in enumerate(zeros)):
        with pytest.raises(ModelLoadError, match=r"layer.qzeros stores a zero point of 0 as \d+.*gptq_v2"):
            read("layer", parts, other)
    else:
        assert read("layer", parts, other).zero_points[:, 0].tolist() == zeros


@pytest.mark.parametrize("meta", [None, {}, {"quantizer": "autogptq:0.7"}, {"quantizer": ["gptqmodel:0.8"]},
                                  {"quantizer": ["gptqmodel:new"]}, {"quantizer": None}, "gptqmodel:1.0"])  # fmt: skip
def test_other_writers_are_not_gptqmodel(meta: Any) -> None:
    assert not scheme(Packing(extra={"meta": meta})).by_words


BAD_CONFIGS: list[tuple[Any, str]] = [
    ("gptq", "quantization_config is 'gptq', not an object"),
    ({}, "quantization_config.quant_method is None; supported: gptq, awq"),
    ({"quant_method": "bitsandbytes", "bits": 4}, "quant_method is 'bitsandbytes'; supported: gptq, awq"),
    ({"quant_method": "gptq"}, "quantization_config.bits is None; supported: 4, 8"),
    ({"quant_method": "gptq", "bits": 3}, "bits is 3; supported: 4, 8"),
    ({"quant_method": "gptq", "bits": "4"}, "bits is '4'"),
    ({"quant_method": "gptq", "bits": 4.0}, "bits is 4.0"),
    ({"quant_method": "awq", "bits": 8}, "bits is 8; supported: 4"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; supported: -1 for whole rows"),
    ({"quant_method": "gptq", "bits": 4, "group_size": True}, "group_size is True"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "format": "gptq_p"}, "format is 'gptq_p'; supported: gptq, gptq_v2"),
    (
        {"quant_method": "gptq", "bits": 4, "format": "gptq", "checkpoint_format": "gptq_v2"},
        "names two formats",
    ),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format is True"),
    ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int8"}, "pack_dtype is 'int8'; supported: int32"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:lm_head": {"bits": 8}}}, "dynamic is .*same bits"),
    ({"quant_method": "gptq", "bits": 4, "adapter": {"name": "lora"}}, "adapter is .*merge it"),
    ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'; supported: gemm"),
    ({"quant_method": "awq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: gemm"),
    ({"quant_method": "awq", "backend": "llm-awq"}, "backend is 'llm-awq'"),
]


@pytest.mark.parametrize(("section", "message"), BAD_CONFIGS, ids=[message[:35] for _, message in BAD_CONFIGS])
def test_an_unsupported_configuration_names_the_field(section: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        scheme_of({"quantization_config": section})


def test_configurations_as_others_write_them() -> None:
    assert scheme_of({}) is None and scheme_of({"quantization_config": None}) is None
    awq = {"quant_method": "AWQ", "version": "GEMM", "zero_point": True, "modules_to_not_convert": ["lm_head"]}
    assert scheme_of({"quantization_config": awq}) == Scheme("awq", 4, 128)
    gptq = {
        "quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq", "format": "gptq",
        "pack_dtype": "int32", "lm_head": False, "dynamic": {"-:.*mlp.*": {}}, "damp_percent": 0.1,
        "modules_in_block_to_quantize": [["self_attn.q_proj"]], "meta": {"quantizer": ["optimum:1.2", "gptqmodel:4.0"]},
    }  # fmt: skip
    assert scheme_of({"quantization_config": gptq}) == Scheme("gptq", 4, -1, less_one=True, by_words=True)


def parts() -> dict[str, torch.Tensor]:
    return packed(quantized(torch.randn(16, 64), Packing()), Packing())


BAD_TENSORS: list[tuple[str, Any, str]] = [
    ("qzeros", None, "layer.qzeros is missing: the layer has g_idx, qweight, scales only"),
    ("scales", None, "layer.scales is missing"),
    ("qweight", lambda t: t.long(), "layer.qweight holds torch.int64, not torch.int32"),
    ("qweight", lambda t: t[None], "layer.qweight has shape .*must be a matrix"),
    ("qweight", lambda t: t[:4], r"layer.scales has shape \[2, 16\], not \[1, 16\]"),
    ("qzeros", lambda t: t[:1], r"layer.qzeros has shape \[1, 2\], not \[2, 2"),
    ("qzeros", lambda t: t[:, :1], "layer.qzeros has shape"),
    ("scales", lambda t: t[:, :8], r"layer.scales has shape \[2, 8\], not \[2, 16\]"),
    ("scales", lambda t: t.to(torch.int32), "layer.scales holds torch.int32, not one of torch.float16"),
    ("scales", lambda t: t.fill_(float("nan")), "layer.scales holds infinity or NaN"),
    ("g_idx", lambda t: t[:5], "layer.g_idx has shape .*must be 64 integers"),
    ("g_idx", lambda t: t + 1, "layer.g_idx names groups 1 to 2; the layer has 0 to 1"),
    ("g_idx", lambda t: t.half(), "layer.g_idx has shape .* of torch.float16"),
]


@pytest.mark.parametrize(
    ("part", "change", "message"), BAD_TENSORS, ids=[message[:40] for _, _, message in BAD_TENSORS]
)
def test_a_tensor_that_does_not_fit_names_the_layer(part: str, change: Any, message: str) -> None:
    given_parts = parts()
    if change is None:
        del given_parts[part]
    else:
        given_parts[part] = change(given_parts[part])
    with pytest.raises(ModelLoadError, match=message):
        read("layer", given_parts, scheme(Packing()))


def test_groups_of_awq_divide_the_rows() -> None:
    packing = Packing("awq", symmetric=False)
    with pytest.raises(ModelLoadError, match="layer has rows of 48 weights, which groups of 32 do not divide"):
        read("layer", packed(quantized(torch.randn(8, 48), packing), packing), scheme(packing))


class TestFiles:
    SCHEME = Scheme("gptq", 4, 32, less_one=True)

    def saved(self, folder: Path, name: str = "model.safetensors", **more: torch.Tensor) -> None:
        named = {f"a.{part}": tensor for part, tensor in parts().items()}
        save_file({**named, "b.weight": torch.ones(2), **more}, folder / name)

    def test_packed_layers_and_others(self, tmp_path: Path) -> None:
        self.saved(tmp_path)
        found = Checkpoint(tmp_path, self.SCHEME)
        assert found.names == ["a"]
        state = found.dequantized()
        assert state.keys() == {"a.weight", "b.weight"} and state["a.weight"].shape == (16, 64)
        assert torch.equal(found.dequantized(lambda name: True)["a.weight"], state["a.weight"].t())

    def test_several_files(self, tmp_path: Path) -> None:
        self.saved(tmp_path)
        save_file({"c.weight": torch.zeros(3)}, tmp_path / "other.safetensors")
        index = {"weight_map": {"a.qweight": "model.safetensors", "c.weight": "other.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert Checkpoint(tmp_path, self.SCHEME).dequantized().keys() == {"a.weight", "b.weight", "c.weight"}

    def test_the_only_file_may_have_another_name(self, tmp_path: Path) -> None:
        self.saved(tmp_path, "gptq_model-4bit-32g.safetensors")
        assert Checkpoint(tmp_path, self.SCHEME).names == ["a"]
        self.saved(tmp_path, "another.safetensors")
        with pytest.raises(ModelLoadError, match=r"another.safetensors, gptq_model-4bit-32g.safetensors, not just one"):
            Checkpoint(tmp_path, self.SCHEME)

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            ({"weight_map": {"a": "../secret.safetensors"}}, "names ../secret.safetensors: no such file"),
            ({"weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors: no such file"),
            ({"weight_map": {"a": 5}}, "names 5|cannot be read"),
            ([], "cannot be read"),
        ],
        ids=["outside", "missing", "number", "list"],
    )
    def test_an_index_that_leads_nowhere(self, tmp_path: Path, index: Any, message: str) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        self.saved(tmp_path, "secret.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelLoadError, match=message):
            Checkpoint(folder, self.SCHEME)

    def test_pickled_weights_are_not_read(self, tmp_path: Path) -> None:
        torch.save({}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelLoadError, match="read from these only"):
            Checkpoint(tmp_path, self.SCHEME)

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
        with pytest.raises(ModelLoadError, match="model.safetensors cannot be read"):
            Checkpoint(tmp_path, self.SCHEME)

    def test_nothing_is_packed(self, tmp_path: Path) -> None:
        save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=r"no packed layer \(\*.qweight\)"):
            Checkpoint(tmp_path, self.SCHEME)

    @pytest.mark.parametrize(
        ("name", "message"), [("c.qzeros", "c.qweight is missing"), ("a.weight", "a is there twice, as a.weight")]
    )
    def test_names_that_contradict_each_other(self, tmp_path: Path, name: str, message: str) -> None:
        self.saved(tmp_path, **{name: torch.ones(2)})
        with pytest.raises(ModelLoadError, match=message):
            Checkpoint(tmp_path, self.SCHEME)
