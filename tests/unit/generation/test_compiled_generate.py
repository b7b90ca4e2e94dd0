"""transformers' own `generate` by compiled graphs: equal to eager's, all in graphs, nothing compiled afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch

from language_models import VOCABULARY, seq2seq, tiny
from torchserve_openvino.config import load_serving_config
from torchserve_openvino.errors import InvalidInputError
from torchserve_openvino.generation.compiled.face import generating
from torchserve_openvino.generation.compiled.layout import Sizes
from torchserve_openvino.generation.compiled.model import CompiledGeneration
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.requests.counters import Counters
from torchserve_openvino.serving.threads import plan_threads
from torchserve_openvino.tasks.parts import compile_parts

pytest.importorskip("transformers")
SIZES = Sizes(places=48, steps=(8,), batches=(1, 2))


def compiled(model: Any, place: Path, sizes: Sizes = SIZES, cache: Path | None = None) -> tuple[Any, Models]:
    """The model with compiled graphs in its place, and what was compiled."""
    options = {"model_caching": cache is not None, **({"cache_dir": str(cache)} if cache else {})}
    config = load_serving_config({"pt2": {"compile": {"enable": True, "backend": "openvino", "options": options}}})
    generation = CompiledGeneration(model, sizes)
    threads = plan_threads(1, workers=1, streams=1, throughput=False, ov_config={}, device="CPU", cores=1)
    models = compile_parts(generation.parts(), config, threads, Counters(), place)
    return generating(generation), models


def texts(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts of several lengths, padded on the left, and their mask."""
    torch.manual_seed(3)
    most = max(lengths)
    ids, mask = torch.zeros(len(lengths), most, dtype=torch.int64), torch.zeros(len(lengths), most, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, most - length :] = torch.randint(3, VOCABULARY, (length,))
        mask[row, most - length :] = 1
    return ids, mask


def same(face: Any, eager: Any, ids: torch.Tensor, mask: torch.Tensor, **how: Any) -> torch.Tensor:
    """Generates with both, and returns the tokens, which are equal."""
    found = []
    for model in (eager, face):
        torch.manual_seed(5)
        found.append(model.generate(ids, attention_mask=mask, pad_token_id=0, **how))
    assert torch.equal(*found), found
    return found[0]


def check_report(models: Models, builds: int) -> None:
    summary = models.report.summary
    assert summary.coverage == 1 and summary.fallbacks == 0 and summary.graph_breaks == 0
    assert models.report.verified
    assert models.report.tracker.builds == builds, "nothing is compiled after the start"


def test_a_decoder(tmp_path: Path) -> None:
    eager = tiny("gemma2")
    face, models = compiled(eager, tmp_path)
    builds = models.report.tracker.builds
    # Longer than the window, and than what one call computes; and a single token.
    for length in (21, 8, 1):
        ids, mask = texts(length)
        same(face, eager, ids, mask, max_new_tokens=12, do_sample=False)
    ids, mask = texts(17, 3, 9)
    same(face, eager, ids, mask, max_new_tokens=9, do_sample=False, repetition_penalty=1.3)
    same(face, eager, ids, mask, max_new_tokens=6, do_sample=True, temperature=0.8, top_k=20)
    same(face, eager, ids, mask, max_new_tokens=6, num_beams=3, num_return_sequences=2)
    check_report(models, builds)
    with pytest.raises(InvalidInputError, match="49 tokens; at most 48"):
        face.generate(torch.ones(1, 45, dtype=torch.int64), max_new_tokens=9, do_sample=False, eos_token_id=None)
    with pytest.raises(InvalidInputError, match="without cache_implementation"):
        face.generate(ids, attention_mask=mask, max_new_tokens=2, cache_implementation="static")
    # The original is as it was.
    assert type(eager).forward is type(face).forward and "forward" not in vars(eager)


@pytest.mark.parametrize("kind", ["t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_an_encoder_and_decoder(kind: str, tmp_path: Path) -> None:
    eager = seq2seq(kind)
    face, models = compiled(eager, tmp_path, Sizes(places=24, batches=(1,), texts=(8, 24)))
    builds = models.report.tracker.builds
    ids, mask = texts(13, 5)
    for row in range(2):
        short = ids[row : row + 1, mask[row] == 1]
        same(face, eager, short, torch.ones_like(short), max_new_tokens=10, do_sample=False)
    same(face, eager, ids, mask, max_new_tokens=8, num_beams=2)
    same(face, eager, ids, mask, max_new_tokens=8, do_sample=True, top_p=0.9)
    check_report(models, builds)
    with pytest.raises(InvalidInputError, match="has 25 tokens; the encoder takes 1 to 24"):
        face.generate(torch.ones(1, 25, dtype=torch.int64), max_new_tokens=2)


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    ids, mask = texts(6)
    for expected in (False, True):
        torch._dynamo.reset()
        eager = seq2seq("t5")
        face, models = compiled(eager, tmp_path, Sizes(places=16, texts=(8,)), tmp_path / "cache")
        same(face, eager, ids, mask, max_new_tokens=5, do_sample=False)
        cache = models.report.to_dict()["cache"]
        assert (cache["traces"] == 0) == (cache["compiles"] == 0) == expected, cache
