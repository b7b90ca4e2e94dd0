"""Sequences of any length on a model compiled for a few lengths: padded with masks and cut back, or refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving_worker import Archive

from encoder import ENCODER, IDS, MASK, encoder, save_encoder
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.tasks.tensor import TensorHandler


def request(ids) -> dict[str, Any]:
    return {"inputs": {"ids": ids}}


def settings(inputs=(IDS, MASK), **batching) -> dict[str, Any]:
    section = {"warmup": {"inputs": list(inputs)}, "batching": {"dims": {"sequence": [4, 8, 16]}, **batching}}
    return {"handler": {"openvino": section}}


def started(archive, config=None, batch_size: int = 2) -> tuple[Archive, TensorHandler]:
    made = archive(config or settings(), model_file=ENCODER, weights=save_encoder, batch_size=batch_size)
    handler = TensorHandler()
    handler.initialize(made.context)
    return made, handler


def check(answer, ids) -> None:
    with torch.no_grad():
        expected = encoder()(torch.tensor(ids))
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(answer[name]), value, rtol=1e-4, atol=1e-5)


def test_lengths_are_padded_with_masks_and_cut_back(archive) -> None:
    made, handler = started(archive)
    lengths = [1, 3, 4, 5, 9, 16]
    for length in lengths:
        ids = [[(7 * i + length) % 50 for i in range(length)]]
        (answer,) = made.handle(handler, request(ids))
        check(answer, ids)
    report = handler.describe_handle()
    assert report["serving"]["compiles_after_ready"] == 0 and report["fallbacks"] == []
    assert report["serving"]["counts"]["padded_dims"] == 4
    assert len(report["serving"]["shapes"]["signatures"]) == 2 * 3


def test_requests_of_different_lengths_share_a_batch_and_keep_their_answers(archive) -> None:
    made, handler = started(archive)
    asked = [[[1, 2, 3]], [[4, 5, 6, 7], [8, 9, 10, 11]], [[40] * 11], [[12]]]
    for answer, ids in zip(made.handle(handler, *map(request, asked)), asked, strict=True):
        check(answer, ids)


def test_a_request_may_bring_its_own_mask(archive) -> None:
    made, handler = started(archive)
    ids, mask = [[1, 2, 3, 4, 5]], [[1, 1, 0, 1, 1]]
    (answer,) = made.handle(handler, {"inputs": {"ids": ids, "mask": mask}})
    with torch.no_grad():
        expected = encoder()(torch.tensor(ids), torch.tensor(mask))
    torch.testing.assert_close(torch.tensor(answer["logits"]), expected["logits"], rtol=1e-4, atol=1e-5)


REFUSED = [
    (request([[1] * 17]), "sequence is 17; this model takes 1 to 16"),
    (request([[1, 50]]), "values must be below 50"),
    (request([[-1]]), "the least value is 0"),
    (request([[1.5, 2.0]]), "input ids is [1, 2] float64"),
    (request([1, 2]), "input ids is [2] int64"),
    ({"inputs": {"ids": [[1, 2]], "mask": [[1, 1, 1]]}}, "where sequence is 2 in another input"),
    ({"inputs": {"mask": [[1, 1]]}}, "'ids' is missing"),
    (request([]), "input ids"),
]


def test_what_does_not_fit_is_refused_with_the_limits(archive) -> None:
    made, handler = started(archive, batch_size=1)
    for body, words in REFUSED:
        (answer,) = made.handle(handler, body)
        assert made.status(0) == 400 and answer["code"] == 400 and words in answer["message"]
    report = handler.describe_handle()
    assert report["serving"]["counts"]["refused_400"] == len(REFUSED) and report["fallbacks"] == []
    assert report["serving"]["compiles_after_ready"] == 0


def test_a_position_and_whole_floats_are_understood(archive) -> None:
    made, handler = started(archive)
    (answer,) = made.handle(handler, {"data": [[1.0, 2.0, 3.0]]})
    check(answer, [[1, 2, 3]])


def test_npy_of_another_type_is_refused(archive) -> None:
    import io

    made, handler = started(archive)
    buffer = io.BytesIO()
    np.save(buffer, np.ones((1, 3), dtype=np.float32))
    (answer,) = made.handle(handler, buffer.getvalue())
    assert made.status(0) == 400 and "float32" in answer["message"]


def test_outside_can_be_compiled_and_is_counted(archive) -> None:
    config = settings(outside="compile")
    config["handler"]["openvino"]["batching"]["dims"] = {"sequence": [4]}
    made, handler = started(archive, config, batch_size=1)
    ids = [[1, 2, 3, 4, 5]]
    (answer,) = made.handle(handler, request(ids))
    check(answer, ids)
    serving = handler.describe_handle()["serving"]
    assert serving["counts"]["outside_compiled"] == 1 and serving["compiles_after_ready"] == 1


def test_exact_takes_the_listed_lengths_only(archive) -> None:
    made, handler = started(archive, settings(mode="exact"), batch_size=2)
    good, bad = [[1, 2, 3, 4]], [[1, 2, 3]]
    answers = made.handle(handler, request(good), request(bad))
    check(answers[0], good)
    assert made.status(1) == 400 and "one of [4, 8, 16]" in answers[1]["message"]


def test_dynamic_takes_every_length_without_compiling(archive) -> None:
    made, handler = started(archive, settings(mode="dynamic"), batch_size=3)
    for length in (1, 2, 5, 7, 16):
        asked = [[[(3 * i + k) % 50 for i in range(length)]] for k in range(3)]
        for answer, ids in zip(made.handle(handler, *map(request, asked)), asked, strict=True):
            check(answer, ids)
    report = handler.describe_handle()
    assert report["serving"]["compiles_after_ready"] == 0, report["recompiles"]
    assert report["fallbacks"] == []


def test_padding_that_would_change_an_answer_is_refused_at_load(archive) -> None:
    with pytest.raises(ModelLoadError, match=r"sequence cannot be padded.*changes when sequence is padded.*mask: true"):
        started(archive, settings(inputs=(IDS,)))


def test_samples_are_run_and_show_what_the_inputs_are(archive) -> None:
    config = {"handler": {"openvino": {"warmup": {"samples": ["sample.json"]}}}}
    made = archive(config, model_file=ENCODER, weights=save_encoder, batch_size=2)
    folder = Path(made.context.system_properties["model_dir"])
    (folder / "sample.json").write_text(json.dumps({"inputs": {"ids": [[1, 2, 3]]}}))
    handler = TensorHandler()
    handler.initialize(made.context)
    ids = [[4, 5, 6]]
    (answer,) = made.handle(handler, request(ids))
    check(answer, ids)
    report = handler.describe_handle()
    assert report["verify"]["passed"] and report["verify"]["cases"] == 3
    assert report["serving"]["compiles_after_ready"] == 0
    assert made.handle(handler, request([[1, 2]]))[0]["code"] == 400


def test_a_missing_sample_stops_the_load(archive) -> None:
    config = {"handler": {"openvino": {"warmup": {"samples": ["absent.json"]}}}}
    made = archive(config, model_file=ENCODER, weights=save_encoder)
    with pytest.raises(ModelLoadError, match="--extra-files"):
        TensorHandler().initialize(made.context)


def test_an_unusable_sample_stops_the_load(archive) -> None:
    config = {"handler": {"openvino": {"warmup": {"samples": ["sample.json"]}}}}
    made = archive(config, model_file=ENCODER, weights=save_encoder)
    (Path(made.context.system_properties["model_dir"]) / "sample.json").write_text("{not json")
    with pytest.raises(ModelLoadError, match="is not a request that this handler accepts.*not valid JSON"):
        TensorHandler().initialize(made.context)


SMALL = """
import torch
from torch import nn
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(50, 8), nn.Linear(8, 50_000)
    def forward(self, ids):
        return self.out(self.embedding(ids).mean(1)).softmax(-1)
"""


def save_small(path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(SMALL, namespace)
    torch.save(namespace["Small"]().state_dict(), path)


def test_padding_that_changes_small_numbers_is_refused_at_load(archive) -> None:
    # Probabilities of 50,000 classes are about 2e-5 each.
    config = settings(inputs=(IDS,))
    made = archive(config, model_file=SMALL, weights=save_small)
    with pytest.raises(ModelLoadError, match="changes when sequence is padded"):
        TensorHandler().initialize(made.context)


MULTIPLES = """
import torch

class Net(torch.nn.Module):
    def forward(self, x, mask):
        if x.shape[1] % 16:
            raise ValueError("takes multiples of 16")
        return (x * mask).cumsum(1)
"""


@pytest.mark.parametrize("sizes", [[32, 64], [16, 64]])
def test_a_model_of_multiples_only_is_tried_with_one(archive, sizes) -> None:
    inputs = [{"name": "x", "shape": ["length"]}, {"name": "mask", "shape": ["length"], "mask": True}]
    section = {"warmup": {"inputs": inputs}, "batching": {"dims": {"length": sizes}}}
    made = archive({"handler": {"openvino": section}}, model_file=MULTIPLES, weights=None, batch_size=1)
    handler = TensorHandler()
    handler.initialize(made.context)
    (answer,) = made.handle(handler, {"inputs": {"x": [[1.0] * (sizes[0] - 3)]}})
    assert answer == [[float(n + 1) for n in range(sizes[0] - 3)]]
