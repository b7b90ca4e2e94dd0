"""Further keys that change how a worker computes: which values are tried, and which of them are worth taking."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchserve_openvino.bench.statistics import Interval, contrasts
from torchserve_openvino.tune.keys import OPENVINO, KeyPath, mapping, value_at

# A value is taken if calls are faster by so much at least, whatever the noise: each changed key has to be kept in mind.
_SMALLEST_GAIN = 0.03
_CONFIDENCE = 0.95
_CONFIG: KeyPath = ("pt2", "compile", "options", "config")
TEXT_GENERATOR = "text_generator"
# What is tried for a task, relative to `handler.openvino`. Each value has to give eager PyTorch's answers, or is out.
_OF_TASKS: dict[str, dict[str, list[Any]]] = {
    "image_classifier": {"image.fold": [True]},
    TEXT_GENERATOR: {
        "generate.weights": ["bf16", "int8"],
        "generate.kv_cache": ["u8"],
        "generate.step_tokens": [64, 1024],
        "generate.prompt_lookup_tokens": [4],
    },
}
# Tasks whose requests have lengths; elsewhere `batching.dims` says so.
_OF_LENGTHS = frozenset({
    "text_classifier", "token_classifier", "question_answerer", "fill_mask", "sentence_embedder",
    "zero_shot_classifier", "reranker", "audio_classifier",
})  # fmt: skip
# These decide together which shapes are compiled: what one of them gains says nothing beside another one.
_SHAPES = frozenset({
    ("text", "lengths"), ("audio", "lengths"), ("batching", "dims"), ("batching", "mode"), ("batching", "one_graph")
})  # fmt: skip
# Followers that make two options with the same value different ones.
_SHOWN = frozenset({"one_graph", "mode"})


@dataclass(frozen=True, order=True)
class Option:
    """Another value of one key, and of keys that have to follow it.

    Attributes:
        path: The key.
        text: The value as JSON, which has an order and can be stored.
        followers: Further keys with their values, likewise.
        why: What suggests the value, for a comment; empty where the task alone does.
    """

    path: KeyPath
    text: str
    followers: tuple[tuple[KeyPath, str], ...] = ()
    why: str = field(default="", compare=False)

    @property
    def excludes(self) -> str:
        """Options with the same value here exclude each other: only one of them is taken."""
        return "shapes" if self.path[len(OPENVINO) :][:2] in _SHAPES else ".".join(self.path)

    @property
    def changes(self) -> dict[KeyPath, Any]:
        """Values by key."""
        return {path: json.loads(text) for path, text in ((self.path, self.text), *self.followers)}

    def __str__(self) -> str:
        own = self.path[: len(OPENVINO)] == OPENVINO
        further = "".join(f", {path[-1]} {text}" for path, text in self.followers if path[-1] in _SHOWN)
        return f"{'.'.join(self.path[len(OPENVINO) :] if own else self.path)} {self.text}{further}"


def offered(
    config: Mapping[str, Any], task: str, named: Mapping[str, Sequence[Any]] | None, siblings: bool | None = None
) -> list[Option]:
    """Returns the values to try, without those that are set already.

    Args:
        config: The whole model-config.yaml.
        task: Name of the archive's handler, such as `image_classifier`.
        named: Keys and values that the user named instead, relative to `handler.openvino` or from the top (`pt2...`).
        siblings: Whether cores run two threads each; None asks the system.
    """
    if named is None:
        named = {**_OF_TASKS.get(task, {}), **_of_models(config, task, siblings)}
    result = []
    for key, values in named.items():
        path = tuple(key.split("."))
        whole = path if path[0] in {"pt2", "handler"} else (*OPENVINO, *path)
        present = value_at(config, whole)
        result += [
            Option(whole, json.dumps(value), _followers(key, value, config)) for value in values if value != present
        ]
    return result


def _followers(key: str, value: Any, config: Mapping[str, Any]) -> tuple[tuple[KeyPath, str], ...]:
    """Returns what else has to change, so that the configuration stays valid."""
    inputs, cached = (*OPENVINO, "warmup", "inputs"), (*OPENVINO, "generate", "kv_cache")
    if key == "image.fold" and value and value_at(config, inputs):
        # The folded graph takes pixels, and declares them itself.
        return ((inputs, "[]"),)
    if key == "generate.weights" and value_at(config, cached) in {"f32", "bf16"}:
        return ((cached, json.dumps("bf16" if value == "bf16" else "f32")),)
    return ()


def _of_models(config: Mapping[str, Any], task: str, siblings: bool | None) -> dict[str, list[Any]]:
    """Returns what is tried whatever the task."""
    result: dict[str, list[Any]] = {}
    pt2 = mapping(config.get("pt2"))
    compiles = mapping(pt2.get("compile"))
    if task == TEXT_GENERATOR:
        # Its graphs are the engine's.
        return result
    # The short form `pt2: openvino` has no place for another key.
    if compiles.get("backend", "openvino") == "openvino" and compiles:
        result["pt2.compile.backend"] = ["export"]
    if has_lengths(config, task):
        result["batching.one_graph"] = [True, False]
    if compiles and (has_siblings() if siblings is None else siblings):
        result[".".join((*_CONFIG, "ENABLE_HYPER_THREADING"))] = ["YES"]
    return result


def has_lengths(config: Mapping[str, Any], task: str) -> bool:
    """Returns True if the requests of an archive have lengths."""
    return task in _OF_LENGTHS or bool(mapping(value_at(config, (*OPENVINO, "batching"))).get("dims"))


def has_siblings() -> bool:
    """Returns whether a core of this machine runs two threads; False where the system does not say."""
    try:
        with open("/sys/devices/system/cpu/smt/active", encoding="ascii") as file:
            return file.read().strip() == "1" and (os.cpu_count() or 1) > 2
    except OSError:
        return False


def effect(present: Mapping[int, Sequence[float]], other: Mapping[int, Sequence[float]]) -> Interval:
    """Returns how many times as fast calls are with another value, all else equal.

    Args:
        present: Milliseconds of a call in each round, by batch size.
        other: The same with the other value, measured in turns with it: at least two rounds.
    """
    rates = np.array([_log_rates(present), _log_rates(other)]).T
    slower, faster = contrasts(rates, _CONFIDENCE)
    if faster.value < 1:
        return faster
    return Interval(1 / slower.value, 1 / slower.high, 1 / slower.low)


def worth_taking(effects: Mapping[Option, Interval]) -> tuple[Option, ...]:
    """Returns the best value of each key whose gain exceeds the smallest one with its whole confidence interval.

    Of the keys that decide on shapes only the best one is taken.
    """
    best: dict[str, Option] = {}
    for option, gain in effects.items():
        rival = best.get(option.excludes)
        if gain.low > 1 + _SMALLEST_GAIN and (rival is None or gain.value > effects[rival].value):
            best[option.excludes] = option
    return tuple(sorted(best.values()))


def _log_rates(by_size: Mapping[int, Sequence[float]]) -> list[float]:
    return [float(np.mean([-math.log(ms) for ms in turn])) for turn in zip(*by_size.values(), strict=True)]
