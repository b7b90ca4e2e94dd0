"""Weights are loaded by the model's own `load_state_dict`: what it takes is taken, with tensors only."""

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from serving_worker import ROWS, WARMUP, close, network
from torch import nn
from torch.nn.utils import parametrizations

from torchserve_openvino.config.sections.openvino_section import WeightsSection
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.serving.loading.files import load_weights
from torchserve_openvino.tasks.tensor import TensorHandler


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


class Overrides(Plain):
    """Takes a checkpoint under another name, with a prefix, and what training stored beside it."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        own = {key.removeprefix("module."): value for key, value in state_dict["weights"].items()}
        return super().load_state_dict(own, strict, assign)


class Renames(Plain):
    """As torchvision's densenet: old names are renamed by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in list(state):
            if key.startswith("conv.1"):
                state[key.replace("conv.1", "first")] = state.pop(key)


class Private(Plain):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[f"{prefix}first.bias"] = state.pop(f"{prefix}first.beta")
        super()._load_from_state_dict(state, prefix, *args)


class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(3, 4))


class Loose(Plain):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


class TakesList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(dict(zip(("first.weight", "first.bias"), state_dict, strict=True)))


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return Plain().state_dict()


def _old_weight_norm() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    state = WeightNorm().state_dict()
    names = {
        "first.parametrizations.weight.original0": "first.weight_g",
        "first.parametrizations.weight.original1": "first.weight_v",
    }
    return {names.get(key, key): value for key, value in state.items()}


CASES = {
    "plain": (Plain, _state),
    "lightning": (Plain, lambda: {"state_dict": _state(), "epoch": 3}),
    "overridden": (Overrides, lambda: {"weights": {f"module.{k}": v for k, v in _state().items()}, "epoch": 3}),
    "overridden, beside another": (Overrides, lambda: {"state_dict": {}, "weights": _state()}),
    "renamed by a hook": (Renames, lambda: {k.replace("first", "conv.1"): v for k, v in _state().items()}),
    "renamed by the module": (Private, lambda: {k.replace("first.bias", "first.beta"): v for k, v in _state().items()}),
    "old weight norm": (WeightNorm, _old_weight_norm),
    "no num_batches_tracked": (Plain, lambda: {k: v for k, v in _state().items() if "num_batches" not in k}),
    "not strict, lightning": (Loose, lambda: {"state_dict": _state(), "epoch": 3}),
    "not strict": (Loose, lambda: {**_state(), "more": torch.zeros(1)}),
    "a list": (TakesList, lambda: [torch.ones(4, 3), torch.zeros(4)]),
}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("name", CASES)
def test_what_the_models_method_takes_is_taken(tmp_path: Path, name: str, suffix: str) -> None:
    kind, make = CASES[name]
    stored, path = make(), tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        if not isinstance(stored, dict) or not all(isinstance(value, torch.Tensor) for value in stored.values()):
            pytest.skip("safetensors holds a plain mapping of tensors")
        from safetensors.torch import save_file

        save_file({key: value.contiguous() for key, value in stored.items()}, path)
    else:
        torch.save(stored, path)
    torch.manual_seed(9)
    model, expected = kind(), kind()
    load_weights(model, path)
    given = stored["state_dict"] if "lightning" in name else stored
    expected.load_state_dict(OrderedDict(given) if isinstance(given, dict) else given)
    for key, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


class Raises(Plain):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict["weights"])


@pytest.mark.parametrize(
    ("kind", "stored", "message"),
    [
        (
            Plain,
            lambda: {**_state(), "head.weight": torch.zeros(1)},
            r"fit Plain: unexpected head.weight; save",
        ),
        (Plain, lambda: {"first.bias": torch.zeros(4)}, r"missing first.weight, norm.bias, .* and 2 more; save"),
        (Plain, lambda: {**_state(), "first.bias": torch.zeros(7)}, r"size mismatch for first.bias"),
        (Plain, lambda: {"state_dict": {"a": torch.zeros(1)}, "epoch": 1}, r"missing first.bias.*unexpected a; save"),
        (Plain, lambda: [torch.zeros(1)], r"holds a list, not a state_dict"),
        (Raises, _state, r"its load_state_dict raises KeyError: 'weights'"),
    ],
    ids=["unexpected", "missing", "sizes", "nested", "a list", "own error"],
)
def test_what_it_does_not_take_is_refused_with_the_reason(tmp_path: Path, kind: Any, stored: Any, message: str) -> None:
    torch.save(stored(), tmp_path / "weights.pth")
    with pytest.raises(ModelLoadError, match=message):
        load_weights(kind(), tmp_path / "weights.pth")


class Pickled:
    pass


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    torch.save({**_state(), "extra": Pickled()}, tmp_path / "weights.pth")
    with pytest.raises(ModelLoadError, match="weights_only=True"):
        load_weights(Loose(), tmp_path / "weights.pth")


# --- checkpoints of training scripts --------------------------------------------------------------------------------


def _prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": value for name, value in _state().items()}


CHECKPOINTS: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "ema": (lambda: {"model_ema": _state(), "epoch": 3}, {"key": "model_ema"}),
    "nested": (lambda: {"ema": {"model": _state(), "decay": 0.9}}, {"key": "ema.model"}),
    "a key with dots": (lambda: {"net.ema": _state()}, {"key": "net.ema"}),
    "ddp": (lambda: _prefixed("module."), {"strip_prefix": "module."}),
    "lightning": (
        lambda: {"state_dict": _prefixed("model."), "epoch": 1},
        {"key": "state_dict", "strip_prefix": "model."},
    ),
    "one of two": (
        lambda: {"model": _prefixed("module."), "loss": {"w": torch.ones(1)}},
        {"key": "model", "strip_prefix": "module."},
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_message_names_the_keys_and_they_work(tmp_path: Path, name: str) -> None:
    make, keys = CHECKPOINTS[name]
    path = tmp_path / "weights.pth"
    torch.save(make(), path)
    with pytest.raises(ModelLoadError) as error:
        load_weights(Plain(), path)
    (advice,) = re.findall(r"set handler\.openvino\.weights: (\{.*?\})", str(error.value))
    assert yaml.safe_load(advice) == keys
    model = Plain()
    load_weights(model, path, WeightsSection.model_validate(keys))
    for key, value in _state().items():
        assert torch.equal(model.state_dict()[key], value), key


def test_every_part_that_fits_is_named(tmp_path: Path) -> None:
    torch.save(
        {"model": _state(), "model_ema": _state(), "optimizer": {"state": {0: {"step": torch.ones(1)}}}},
        tmp_path / "w.pth",
    )
    with pytest.raises(ModelLoadError, match=r"\{key: model\} or \{key: model_ema\} in the YAML"):
        load_weights(Plain(), tmp_path / "w.pth")


def test_a_state_dict_of_torchscript_takes_a_prefix_too(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Plain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    torch.jit.trace(Outer().eval(), torch.zeros(2, 3)).save(str(tmp_path / "w.pt"))
    with pytest.raises(ModelLoadError, match=r'strip_prefix: "net\."'):
        load_weights(Plain(), tmp_path / "w.pt")
    load_weights(Plain(), tmp_path / "w.pt", WeightsSection(strip_prefix="net."))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"key": "ema"}, r"weights.key: w.pth has no state_dict under 'ema'; it has model, twice, model_ema.model"),
        ({"key": "model_ema.no"}, r"no state_dict under 'model_ema.no'"),
        ({"key": "epoch"}, r"no state_dict under 'epoch'"),
        ({"key": "model", "strip_prefix": "module."}, r"no weight in w.pth has a name that begins with 'module.'"),
        ({"key": "model", "strip_prefix": "first."}, r"does not fit Plain"),
        ({"key": "twice", "strip_prefix": "m."}, r"two weights in w.pth have the same name"),
    ],
)
def test_wrong_keys_are_refused_by_name(tmp_path: Path, keys: dict[str, str], message: str) -> None:
    twice = {**_state(), **_prefixed("m.")}
    torch.save({"model": _state(), "model_ema": {"model": _state()}, "twice": twice, "epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(ModelLoadError, match=message):
        load_weights(Plain(), tmp_path / "w.pth", WeightsSection.model_validate(keys))


def test_the_yaml_is_read(archive: Any) -> None:
    section = {"warmup": WARMUP, "weights": {"key": "model_ema", "strip_prefix": "module."}}

    def write(path: Path) -> None:
        torch.save({"model_ema": {f"module.{k}": v for k, v in network().state_dict().items()}}, path)

    made = archive({"handler": {"openvino": section}}, weights=write)
    handler = TensorHandler()
    handler.initialize(made.context)
    close(made.handle(handler, ROWS)[0])
    alone = archive({"handler": {"openvino": section}}, model_file=None, weights=write)
    with pytest.raises(ModelLoadError, match=r"handler.openvino.weights is for checkpoints"):
        TensorHandler().initialize(alone.context)
    misspelt = archive({"handler": {"openvino": {"weights": {"strip_prefx": "a"}}}}, weights=write)
    with pytest.raises(ModelLoadError, match="Did you mean 'strip_prefix'"):
        TensorHandler().initialize(misspelt.context)


def test_tensors_that_safetensors_leaves_out_are_those_they_are_tied_to(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.last.weight = self.first.weight

    model, other = Tied(), Tied()
    path = tmp_path / "weights.safetensors"
    save_model(model, str(path))
    load_weights(other, path, WeightsSection())
    assert torch.equal(other.first.weight, model.first.weight) and other.last.weight is other.first.weight
