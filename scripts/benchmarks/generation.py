"""Compares ways to generate text: eager PyTorch, this package's engine, OpenVINO GenAI bare on the same model.

The models are Llamas with random weights, which decode as fast as trained ones. `gptq` is a checkpoint of 4 bits made
of the same weights, by rounding. All contenders generate the same number of tokens after random prompts, and take
turns, so that a change in the machine's speed affects all. Needs the extras `generate` and `quantize`.

"guesses" is `prompt_lookup_tokens: 8`. A random model soon repeats a single token, which is easy to guess: this is the
most that guesses can bring. trained_generation.py says what they bring in texts.

    python scripts/benchmarks/generation.py
    python scripts/benchmarks/generation.py --models small --tokens 16 --turns 2 --only "eager,engine f32,bare f32"
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.gptq_folder import save_gptq
from benchmarks.harness import interleave

# "+": `dynamic_quantization: true`, and cached keys and values of 8 bits.
FORMATS = ("f32", "bf16", "int8", "int4", "int8+", "int4+", "gptq")
_GUESSES = 8
CONTENDERS = (
    "eager", "eager one thread", *(f"engine {form}" for form in FORMATS), *(f"bare {form}" for form in FORMATS),
    *(f"engine {form} guesses" for form in ("f32", "int8", "int8+")),
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Layers, features, heads, heads of keys and values, and tokens in the vocabulary of a model."""

    layers: int
    features: int
    heads: int
    shared_heads: int
    vocabulary: int


# 11, 15 and 115 million weights without the embedding, which is only looked up.
MODELS = {
    "small": Sizes(4, 512, 8, 8, 512),
    "small-8k": Sizes(4, 512, 8, 8, 8192),
    "grouped": Sizes(12, 1024, 16, 4, 8192),
}
Answer = Callable[[], list[list[int]]]


def main(
    models: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(MODELS)}")] = ",".join(MODELS),
    only: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(CONTENDERS)}")] = ",".join(CONTENDERS),
    streams: Annotated[str, typer.Option(help="Numbers of prompts at once, by comma.")] = "1,8",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens to generate after each prompt.", min=2)] = 64,
    turns: Annotated[int, typer.Option(help="Measured turns.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="CPU threads of each contender.", min=1)] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Measures tokens per second."""
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(threads)
    names = output.chosen(only, CONTENDERS, "--only")
    levels = [int(level) for level in streams.split(",")]
    results = []
    for name in output.chosen(models, MODELS, "--models"):
        for level in levels:
            output.progress.print(f"{name}, {level} prompts", highlight=False)
            with ExitStack() as stack:
                calls, seconds = _contenders(stack, MODELS[name], names, level, prompt, tokens, threads)
                same = _same(calls)
                times = interleave(calls, turns, warmup=1)
            rows = [
                {
                    "contender": one,
                    "tokens_per_second": level * tokens / times.median(one) * 1e3,
                    "over_first": times.ratio(names[0], one),
                    "same_tokens": same[one],
                    "start_seconds": seconds[one],
                    "milliseconds": times.milliseconds[one],
                }
                for one in names
            ]
            results.append({"model": name, "prompts": level, "rows": rows})
            output.results().print(_table(f"{name}, {level} prompts, {tokens} tokens each", names[0], rows))
    output.write_json(json_path, {"prompt": prompt, "tokens": tokens, "threads": threads, "results": results})


def _table(title: str, first: str, rows: list[dict[str, Any]]) -> Any:
    columns = ["contender", "tokens/s", f"x {first}", f"tokens as {first}'s", "start s"]
    cells = [
        (
            row["contender"], f"{row['tokens_per_second']:.1f}", output.number(row["over_first"]),
            f"{row['same_tokens']:.0%}", f"{row['start_seconds']:.1f}",
        )
        for row in rows
    ]  # fmt: skip
    return output.table(title, columns, cells)


def _contenders(
    stack: ExitStack, sizes: Sizes, names: list[str], level: int, prompt: int, tokens: int, threads: int
) -> tuple[dict[str, Answer], dict[str, float]]:
    """Starts the contenders; returns a call of each, and what its start took in seconds."""
    import time

    import torch

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tsov-bench-")))
    model = random_model(sizes, prompt + tokens)
    model.save_pretrained(folder / "model")
    if any(name.endswith("gptq") for name in names):
        save_gptq(folder / "gptq", model)
    prompts = torch.randint(3, sizes.vocabulary, (level, prompt)).tolist()
    calls: dict[str, Answer] = {}
    seconds = {}
    for name in names:
        started = time.perf_counter()
        kind, _, form = name.partition(" ")
        if kind == "eager":
            calls[name] = _eager(model, prompts, tokens, 1 if form else threads)
        else:
            make = _engine if kind == "engine" else _bare
            calls[name] = make(stack, folder, form, prompts, tokens, threads)
        seconds[name] = time.perf_counter() - started
    return calls, seconds


def random_model(sizes: Sizes, length: int) -> Any:
    """A Llama with random weights, in eval mode.

    Args:
        sizes: Of the model.
        length: Longest sequence in tokens.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.features, intermediate_size=2 * sizes.features,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.shared_heads,
        max_position_embeddings=max(2048, length), bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _eager(model: Any, prompts: list[list[int]], tokens: int, threads: int) -> Answer:
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    ids = torch.tensor(prompts)

    def call() -> list[list[int]]:
        usual = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with torch.inference_mode():
                output_ids = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        finally:
            # The number is the whole process's; what is loaded after this call has its own.
            torch.set_num_threads(usual)
        return output_ids[:, ids.shape[1] :].tolist()

    return call


def _settings(folder: Path, form: str, threads: int) -> Any:
    from torchserve_openvino.config.sections.generate import GenerateSection
    from torchserve_openvino.config.sections.openvino_section import VerifySection
    from torchserve_openvino.generation.text.engine_settings import EngineSettings

    form, _, guesses = form.partition(" ")
    packed, faster = form == "gptq", form.endswith("+")
    weights = "auto" if packed else form.removesuffix("+")
    section = GenerateSection(
        weights=weights,  # type: ignore[arg-type]
        prefix_caching=False, dynamic_quantization=faster, kv_cache="u8" if faster else None,
        prompt_lookup_tokens=_GUESSES if guesses else 0,
    )  # fmt: skip
    # Random weights do not survive 4 bits as trained ones do; here the speed is measured.
    return EngineSettings(
        folder / ("gptq" if packed else "model"), section, VerifySection(on_violation="warn"), threads
    )


def _store(folder: Path) -> Any:
    from torchserve_openvino.cache.storage.store import Store

    return Store(folder / "cache")


def _engine(stack: ExitStack, folder: Path, form: str, prompts: list[list[int]], tokens: int, threads: int) -> Answer:
    from torchserve_openvino.generation.text.opening import open_engine

    opened = open_engine(_settings(folder, form, threads), _store(folder))
    stack.callback(opened.engine.close)
    return by_engine(opened.engine, prompts, tokens)


def by_engine(engine: Any, prompts: list[list[int]], tokens: int) -> Answer:
    """Returns a call of this package's engine that generates so many tokens after each prompt, all at once."""
    from torchserve_openvino.generation.text.engine import Sampling

    sampling = Sampling(tokens, ignore_eos=True)

    def call() -> list[list[int]]:
        streams = [engine.submit(prompt, sampling) for prompt in prompts]
        return [[token.id for piece in stream for token in piece.tokens] for stream in streams]

    return call


def _bare(stack: ExitStack, exported: Path, form: str, prompts: list[list[int]], tokens: int, threads: int) -> Answer:
    """OpenVINO GenAI by its own batch call, on the model that this package exported."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    from torchserve_openvino.generation.text.engine_settings import properties
    from torchserve_openvino.generation.text.making import Making

    settings = _settings(exported, form, threads)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.num_kv_blocks = 0, 512
    scheduler.max_num_batched_tokens = settings.section.step_tokens
    with Making(settings, _store(exported)).ready() as (folder, _):
        pipe = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties(settings))
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
    config.eos_token_id, config.stop_token_ids = 2, {2}
    ids = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]

    def call() -> list[list[int]]:
        generated = pipe.generate(ids, [config] * len(ids))
        return [list(one.m_generation_ids[0]) for one in generated]

    return call


def _same(calls: dict[str, Answer]) -> dict[str, float]:
    """Share of tokens that are those of the first contender."""
    answers = {name: call() for name, call in calls.items()}
    first = next(iter(answers.values()))
    return {name: same_share(first, answer) for name, answer in answers.items()}


def same_share(first: list[list[int]], other: list[list[int]]) -> float:
    """Returns the share of equal tokens of equally long answers."""
    pairs = [pair for one, two in zip(first, other, strict=True) for pair in zip(one, two, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


if __name__ == "__main__":
    typer.run(main)
