"""The tasks that are fuzzed: small models with random weights, valid requests, and hostile ones of their own kind."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from request_fuzzing import payloads
from request_fuzzing.payloads import BINARY, TEXT, Payload

ROOT = Path(__file__).resolve().parents[2]
# The tests' builders of small models.
sys.path.append(str(ROOT / "tests"))

CONFIG = """
batchSize: 4
maxBatchDelay: 40
minWorkers: 1
maxWorkers: 1
responseTimeout: 60
pt2: {{compile: {{enable: true, backend: openvino}}}}
handler:
  openvino:
    threads: 1
    batching: {{buckets: [4]}}
{section}
"""
_TEXTS = ["Ada Lovelace lived in London.", "Yes", "The train to Paris leaves at noon. " * 3, "No one knows [1]."]
_LABELS = {"candidate_labels": ["travel", "sleep", "machines"]}
_SEEDS = 4


@dataclass(frozen=True)
class Subject:
    """One task with a model.

    Attributes:
        name: The task; also the model's name on the server.
        pack: Makes the archive in a folder.
        valid: Valid requests.
        forms: Valid JSON requests, which hostile ones are made of; ``(path below the model's, JSON)``.
        own: Makes hostile requests of the task's own kind.
    """

    name: str
    pack: Callable[[Path], Path]
    valid: list[Payload]
    forms: list[tuple[str, Any]]
    own: list[Callable[[random.Random], Payload]] = field(default_factory=list)

    def hostile(self, rng: random.Random) -> Payload:
        """Returns a hostile request."""
        path, form = rng.choice(self.forms)
        kind = rng.choices(["mutated", "broken", "own", "typed", "noise"], [45, 20, 25, 5, 5])[0]
        if kind == "mutated" or (kind == "own" and not self.own):
            label, value = payloads.mutated(form, rng)
            while rng.random() < 0.3:
                more, value = payloads.mutated(value, rng)
                label += f", {more}"
            return Payload.of_json(label, value, path)
        if kind == "broken":
            broken = payloads.broken_json(form, rng)
            return Payload(broken.label, broken.body, broken.content_type, path)
        if kind == "own":
            return rng.choice(self.own)(rng)
        body = rng.choice(self.valid).body
        if kind == "typed":
            wrong = rng.choice([BINARY, TEXT, payloads.JSON, "application/x-www-form-urlencoded", "image/png", ""])
            return Payload(f"sent as {wrong!r}", body, wrong, path)
        noise = rng.choice([b"", b"\0", b" ", rng.randbytes(rng.randint(1, 5000)), payloads.flipped(body, rng)])
        return Payload("noise", noise, rng.choice([BINARY, TEXT, payloads.JSON]), path)


# --- tensors and photos ---------------------------------------------------------------------------------------------

_NETWORK = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
    def forward(self, x):
        return self.last(self.first(x).relu())
"""
# Answers with 20,000 numbers to 4.
_GROWING = """
import torch
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
    def forward(self, x):
        return (self.first(x) / x[:, :1]).repeat(1, 5000)
"""
_CLASSIFIER = """
import torch
class Network(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Conv2d(3, 8, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
                         torch.nn.Flatten(), torch.nn.Linear(8, 5))
"""


def _from_source(name: str, source: str, handler: str, section: str) -> Callable[[Path], Path]:
    def pack(folder: Path) -> Path:
        import torch

        from torchserve_openvino.packaging.archive import run_archiver

        (folder / f"{name}_network.py").write_text(source)
        (folder / "model-config.yaml").write_text(CONFIG.format(section=section))
        namespace: dict[str, Any] = {}
        exec(source, namespace)
        torch.manual_seed(0)
        torch.save(namespace["Network"]().state_dict(), folder / "weights.pth")
        arguments = ["--version", "1.0", "--model-file", str(folder / f"{name}_network.py"), "--handler"]
        arguments += [_handler(handler), "--serialized-file", str(folder / "weights.pth")]
        return run_archiver([*arguments, "--config-file", str(folder / "model-config.yaml")], name, folder)

    return pack


def _handler(name: str) -> str:
    command = [sys.executable, "-m", "torchserve_openvino.cli", "handler-path", name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _npy(rows: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(rows, dtype=np.float32))
    return buffer.getvalue()


def _rows(number: int, rows: int = 1) -> list[list[float]]:
    generator = np.random.default_rng(number)
    return [[float(number) for number in row] for row in generator.uniform(0.1, 1, (rows, 4)).round(3)]


def _kserve(rows: list[list[float]]) -> dict[str, Any]:
    flat = [number for row in rows for number in row]
    return {"id": "7", "inputs": [{"name": "x", "shape": [len(rows), 4], "datatype": "FP32", "data": flat}]}


def _many_inputs(rng: random.Random) -> Payload:
    count = rng.choice([3, 300, 50_000])
    entry = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    return Payload.of_json(f"{count} inputs", {"inputs": [{**entry, "name": f"x{n}"} for n in range(count)]})


def _odd_type(rng: random.Random) -> Payload:
    import torch

    names = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
    name = rng.choice([*names, "nn", "Tensor", "float", "__name__", "", "torch.float32"])
    return Payload.of_json(f"dtype {name}", {"data": [[1, 2, 3, 4]], "dtype": name})


def _odd_shape(rng: random.Random) -> Payload:
    shape = rng.choice(
        [[0, 10**24], [10**400], [-1, 4], [4], [1, 4.0], [True, 4], [1] * 100, [2**62] * 64, "4", None, [[4]]]
    )
    kind = rng.choice(["FP32", "BYTES", "BOOL", "INT8", "UINT64", "FP16", "", "fp32", "INT65", "bf16"])
    data = rng.choice(
        [[1, 2, 3, 4], [[1, 2, 3, 4]], [1e300] * 4, [], ["a"] * 4, [None] * 4, [True] * 4, 1, [10**400] * 4]
    )
    entry = {"name": "x", "shape": shape, "datatype": kind, "data": data}
    return Payload.of_json(f"shape {str(shape)[:40]} of {kind}", {"inputs": [entry]})


def _tensor(name: str, source: str) -> Subject:
    valid = [Payload.of_json("rows", _rows(seed)) for seed in range(_SEEDS)]
    valid += [Payload("npy", _npy(_rows(9))), Payload.of_json("kserve", _kserve(_rows(8)))]
    forms = [
        ("", _rows(1)), ("", {"data": _rows(2), "dtype": "float32"}), ("", {"inputs": {"x": _rows(3)}}),
        ("", _kserve(_rows(4))),
    ]  # fmt: skip
    own = [payloads.npy, payloads.npy, _many_inputs, _odd_type, _odd_shape]
    if source is _GROWING:
        own = [_long_answer, _infinite]
    section = "    warmup: {inputs: [{shape: [4]}], batch_sizes: [1, 4, 32]}"
    return Subject(name, _from_source(name, source, "tensor", section), valid, forms, own)


def _long_answer(rng: random.Random) -> Payload:
    rows = _rows(1, rng.choice([2, 15, 32]))
    if rng.random() < 0.3:
        return Payload(f"{len(rows)} rows", _npy(rows))
    return Payload.of_json(f"{len(rows)} rows", rng.choice([rows, _kserve(rows)]))


def _infinite(rng: random.Random) -> Payload:
    rows = [[rng.choice([0.0, -1.0, 1e39, float("nan"), float("inf")]) for _ in range(4)]]
    return Payload.of_json(f"rows {rows}", rng.choice([rows, {"inputs": {"x": rows}}, _kserve(rows)]))


def _picture_payload(rng: random.Random) -> Payload:
    label, body = payloads.hostile_picture(rng)
    if rng.random() < 0.4:
        return Payload.of_json(f"{label} in base64", {"data": payloads.base64_of(body)})
    return Payload(label, body)


def _image_classifier() -> Subject:
    pictures = [payloads.picture(40 + 9 * seed, 50, kind) for seed, kind in enumerate(["PNG", "JPEG", "WEBP", "BMP"])]
    forms = [
        ("", {"data": payloads.base64_of(pictures[0])}),
        ("", [[[0.1] * 32] * 32] * 3),
        ("", {"b64": payloads.base64_of(pictures[1])}),
    ]
    section = "    image: {resize: 36, crop: 32}"
    own = [_picture_payload]
    valid = [Payload("picture", body) for body in pictures]
    return Subject(
        "image_classifier",
        _from_source("image_classifier", _CLASSIFIER, "image_classifier", section),
        valid,
        forms,
        own,
    )


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def _from_hub(task: str, save: Callable[[Path], Path], section: str, config: str = CONFIG) -> Callable[[Path], Path]:
    def pack(folder: Path) -> Path:
        saved = save(folder / "saved")
        (folder / "model-config.yaml").write_text(config.format(section=section))
        command = [sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", str(saved), "--task", task]
        command += ["--model-name", task, "--config-file", str(folder / "model-config.yaml")]
        done = subprocess.run([*command, "--export-path", str(folder)], check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{task} was not packaged: {done.stdout}{done.stderr}")
        return folder / f"{task}.mar"

    return pack


# Requests of standard clients, by task.
_STANDARD: dict[str, list[tuple[str, Any]]] = {
    "sentence_embedder": [
        ("v1/embeddings", {"input": _TEXTS[:2], "model": "sentence_embedder", "encoding_format": "base64"}),
        ("v1/embeddings", {"input": [[5, 6, 7], [8]], "dimensions": 8, "user": "x"}),
        ("embed", {"inputs": _TEXTS[1:], "normalize": True, "truncate": True}),
        ("", {"input": [5, 6, 7]}),
    ],
    "reranker": [
        ("v2/rerank", {"model": "reranker", "query": "Where?", "documents": _TEXTS[:2], "top_n": 1}),
        ("v1/rerank", {"query": "Where?", "documents": [{"text": _TEXTS[0]}], "return_documents": True}),
        ("rerank", {"query": "Where?", "texts": _TEXTS[:2], "raw_scores": True, "return_text": True}),
    ],
    "text_classifier": [("predict", {"inputs": [[_TEXTS[0]], ["b"]]}), ("predict", {"inputs": "a"})],
}


def _text(task: str, inputs: list[Any], parameters: dict[str, Any], **more: Any) -> Subject:
    from hub_models import text_model

    forms = [("", {"inputs": item, "parameters": parameters}) for item in inputs]
    forms.append(("", {"inputs": inputs, "parameters": {**parameters, **more}}))
    section = "    text: {lengths: [16, 64]}"
    pack = _from_hub(task, lambda folder: text_model(task, folder), section)
    valid = [Payload.of_json("text", form) for _, form in forms]
    return Subject(task, pack, valid, [*forms, *_STANDARD.get(task, [])])


def _vision(task: str, parameters: dict[str, Any], **more: Any) -> Subject:
    from hub_vision_models import vision_model

    pictures = [payloads.picture(40 + 11 * seed, 60 - 8 * seed) for seed in range(_SEEDS)]
    forms = [("", {"inputs": payloads.base64_of(picture), "parameters": parameters}) for picture in pictures[:2]]
    forms.append(("", {"inputs": [*map(payloads.base64_of, pictures)], "parameters": {**parameters, **more}}))

    def own(rng: random.Random) -> Payload:
        label, body = payloads.hostile_picture(rng)
        if rng.random() < 0.3 and not parameters:
            return Payload(label, body)
        return Payload.of_json(label, {"inputs": payloads.base64_of(body), "parameters": {**parameters, **more}})

    pack = _from_hub(task, lambda folder: vision_model(task, folder), "")
    return Subject(task, pack, [Payload.of_json("picture", form) for _, form in forms], forms, [own])


def _audio(task: str, model: str) -> Subject:
    from hub_audio_models import audio_model

    sounds = [payloads.sound(0.3 + 0.2 * seed, tone=200 + 90 * seed) for seed in range(_SEEDS)]
    forms = [
        ("", {"inputs": payloads.base64_of(sounds[0])}),
        ("", {"inputs": [*map(payloads.base64_of, sounds)], "parameters": {}}),
    ]

    def own(rng: random.Random) -> Payload:
        label, body = payloads.hostile_sound(rng)
        return (
            Payload(label, body) if rng.random() < 0.5 else Payload.of_json(label, {"inputs": payloads.base64_of(body)})
        )

    pack = _from_hub(task, lambda folder: audio_model(model, folder), "    audio: {max_seconds: 2.0}")
    return Subject(task, pack, [Payload("sound", body) for body in sounds], forms, [own])


def _text_generator() -> Subject:
    from chat_models import language_model

    sampled = {"max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 1, "repetition_penalty": 1.1}
    message = {"role": "user", "content": "A model is served"}
    forms = [
        ("", {"inputs": "A model", "parameters": sampled}),
        ("", {"prompt": "TorchServe", "max_tokens": 3, "logprobs": 2, "stop": ["x"]}),
        ("v1/completions", {"prompt": ["TorchServe", "x"], **sampled, "n": 2, "echo": True}),
        ("v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "stream": False}),
        ("v1/chat/completions", {"messages": [message], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}),
    ]  # fmt: skip
    valid = [Payload.of_json("prompt", {"prompt": f"A model is served {n}", "max_tokens": 4}) for n in range(_SEEDS)]
    section = "    generate: {max_tokens: 8, max_length: 128, max_waiting: 500}"
    return Subject("text_generator", _from_hub("text_generator", language_model, section), valid, forms)


def _image_generator() -> Subject:
    from diffusion_models import pipeline_folder

    own = {"prompt": "a cat", "seed": 1, "steps": 2, "guidance": 2.0, "n": 2, "response_format": "b64_json"}
    forms = [
        ("", own), ("", {"inputs": "a cat", "parameters": {"seed": 2, "steps": 1}}),
        ("v1/images/generations", {"prompt": "a cat", "n": 1, "size": "auto"}),
        ("", {"prompt": "a cat", "steps": 2, "strength": 0.9, "image": payloads.base64_of(payloads.picture(64, 64))}),
    ]  # fmt: skip
    valid = [Payload.of_json("prompt", {"prompt": "a cat", "seed": seed, "steps": 1}) for seed in range(_SEEDS)]
    section = "    image_generation: {max_steps: 3, max_images: 2, default_steps: 1}"
    config = CONFIG.replace("    batching: {{buckets: [4]}}\n", "")
    pack = _from_hub("image_generator", lambda folder: pipeline_folder("sd", folder), section, config)
    return Subject("image_generator", pack, valid, forms)


_QUESTIONS = [{"question": "Who?", "context": text} for text in _TEXTS]
_RANKINGS = [{"query": "Where?", "texts": [text, *_TEXTS[:number]]} for number, text in enumerate(_TEXTS)]
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "tensor": lambda: _tensor("tensor", _NETWORK),
    "tensor_growing": lambda: _tensor("tensor_growing", _GROWING),
    "image_classifier": _image_classifier,
    "text_classifier": lambda: _text("text_classifier", _TEXTS, {}, top_k=2),
    "token_classifier": lambda: _text("token_classifier", _TEXTS, {}, aggregation_strategy="max", ignore_labels=["O"]),
    "question_answerer": lambda: _text("question_answerer", _QUESTIONS, {}, top_k=3, doc_stride=4, max_answer_len=5),
    "fill_mask": lambda: _text("fill_mask", [f"{text} [MASK]" for text in _TEXTS], {}, top_k=3, targets=["the", "a"]),
    "sentence_embedder": lambda: _text("sentence_embedder", _TEXTS, {}),
    "zero_shot_classifier": lambda: _text("zero_shot_classifier", _TEXTS, _LABELS, hypothesis_template="It is {}."),
    "reranker": lambda: _text("reranker", _RANKINGS, {}, raw_scores=True, return_text=True),
    "hub_image_classifier": lambda: _vision("hub_image_classifier", {}, top_k=2),
    "image_segmenter": lambda: _vision("image_segmenter", {}, format="png"),
    "object_detector": lambda: _vision("object_detector", {}, threshold=0.1),
    "depth_estimator": lambda: _vision("depth_estimator", {}, format="png"),
    "zero_shot_image_classifier": lambda: _vision("zero_shot_image_classifier", _LABELS, hypothesis_template="A {}."),
    "image_embedder": lambda: _vision("image_embedder", {}, normalize=True),
    "audio_classifier": lambda: _audio("audio_classifier", "Wav2Vec2ForSequenceClassification"),
    "speech_recognizer": lambda: _audio("speech_recognizer", "Wav2Vec2ForCTC"),
    "text_generator": _text_generator,
    "image_generator": _image_generator,
}
