"""Times a diffusion pipeline: seconds per picture and milliseconds per component, this package against eager diffusers.

    python scripts/benchmarks/diffusion.py
    python scripts/benchmarks/diffusion.py --width 32 --size 64x64 --steps 2 --pictures 3 --json diffusion.json

Stable Diffusion's architecture with random weights: text encoder, unet of three levels, VAE. Both contenders are the
same handler, with and without compilation, and make the same picture, whose largest difference is shown. Needs the
extra `diffusion`.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import output
from benchmarks.harness import Call, interleave
from benchmarks.workers import context_for, own_threads

EAGER, OURS = "eager", "this package"
TOKENS = 77


def save(folder: Path, width: int) -> None:
    """Saves the pipeline; its levels are 1, 2 and 4 times ``width`` wide."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    levels, inner = (width, 2 * width, 4 * width), 4 * width
    words = [chr(code) for code in range(97, 123)]
    words = [*words, *(f"{word}</w>" for word in words), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    end = vocabulary["<|endoftext|>"]
    text = CLIPTextConfig(
        hidden_size=inner, intermediate_size=4 * inner, num_attention_heads=8, num_hidden_layers=6, eos_token_id=end,
        vocab_size=len(words), max_position_embeddings=TOKENS, bos_token_id=end - 1, pad_token_id=end,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        block_out_channels=levels, layers_per_block=2, sample_size=64, cross_attention_dim=inner, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=8,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), in_channels=4, out_channels=4,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=levels, layers_per_block=1, latent_channels=4, norm_num_groups=8,
        down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3,
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
    )
    StableDiffusionPipeline(
        vae=vae, unet=unet, text_encoder=CLIPTextModel(text), scheduler=scheduler, feature_extractor=None,
        tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=TOKENS), safety_checker=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip


def started(folder: Path, size: str, steps: int, *, compiled: bool) -> tuple[Any, Call]:
    """The handler, initialized on an unpacked archive, and what gives torch its threads."""
    from torchserve_openvino.tasks.pictures.handler import ImageGenerator

    settings = {
        "pt2": {"compile": {"enable": compiled, "backend": "openvino"}},
        "handler": {"openvino": {"image_generation": {"sizes": [size], "max_steps": max(steps, 2)}}},
    }
    context = context_for(folder, settings)
    handler = ImageGenerator()
    handler.initialize(context)
    handler.context = context
    return handler, own_threads()


def component_calls(handler: Any, size: str) -> dict[str, Call]:
    """A call of each graph with random values, at the largest batch that it is compiled for."""
    from torchserve_openvino.generation.images.components import PictureSize
    from torchserve_openvino.serving.shapes.input_spec import Signature, declared_specs

    section = handler.config.openvino.image_generation
    calls: dict[str, Call] = {}
    for part in handler.maker.components.parts([PictureSize.of(size)], section):
        signature, generator = Signature(max(part.batches)), torch.Generator().manual_seed(0)
        inputs = {spec.name: spec.make(signature, generator) for spec in declared_specs(part.inputs, [])}
        calls[part.name] = lambda part=part, inputs=inputs: _without_gradients(part.calls, inputs)
    return calls


def _without_gradients(call: Any, inputs: Mapping[str, torch.Tensor]) -> Any:
    with torch.no_grad():
        return call(**inputs)


def measure(
    handlers: Mapping[str, Any], threads: Mapping[str, Call], size: str, steps: int, pictures: int
) -> dict[str, Any]:
    """Times whole pictures, then each component, in turns."""
    from torchserve_openvino.generation.images.components import PictureSize
    from torchserve_openvino.generation.images.pictures import ImageSettings

    image_settings = ImageSettings("a cat on a table", PictureSize.of(size), steps, 7.5)
    arrays = {name: np.array(handler.maker.make(image_settings, 7), int) for name, handler in handlers.items()}
    whole: dict[str, Call] = {
        name: lambda handler=handler: handler.maker.make(image_settings, 7) for name, handler in handlers.items()
    }
    times = interleave(whole, pictures, before=threads)
    figures: dict[str, Any] = {
        "largest_difference": int(np.abs(arrays[EAGER] - arrays[OURS]).max()),
        "picture": {f"{name}_s": times.median(name) / 1e3 for name in handlers},
        "speedup": times.ratio(EAGER, OURS),
        "components": {},
    }
    calls = {name: component_calls(handler, size) for name, handler in handlers.items()}
    for part in calls[OURS]:
        times = interleave({name: calls[name][part] for name in handlers}, 2 * pictures, 1, before=threads)
        figures["components"][part] = {
            "eager_ms": times.median(EAGER), "ours_ms": times.median(OURS), "speedup": times.ratio(EAGER, OURS)
        }  # fmt: skip
    return figures


def show(result: Mapping[str, Any]) -> None:
    picture = result["picture"]
    whole = (picture[f"{EAGER}_s"] * 1e3, picture[f"{OURS}_s"] * 1e3, result["speedup"])
    rows = [("picture", *whole)]
    rows += [(name, *component.values()) for name, component in result["components"].items()]
    cells = [(name, f"{eager:.1f}", f"{ours:.1f}", f"{ratio:.2f}") for name, eager, ours, ratio in rows]
    title = f"{result['size']}, {result['steps']} steps, width {result['width']}, f32"
    out = output.results()
    out.print(output.table(title, ("", "eager ms", "this package ms", "x"), cells))
    out.print(f"largest difference of the pictures: {result['largest_difference']} of 255")


def main(
    width: Annotated[int, typer.Option(help="Channels of the first level, a multiple of 8.", min=8)] = 64,
    size: Annotated[str, typer.Option(help="Width x height of the picture.")] = "256x256",
    steps: Annotated[int, typer.Option(help="Steps of each picture.", min=1)] = 10,
    pictures: Annotated[int, typer.Option(help="Measured pictures of each contender.", min=2)] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Prints seconds per picture and milliseconds per component."""
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(prefix="tsov-bench-") as root:
        folder = Path(root)
        save(folder / "hub", width)
        handlers, threads = {}, {}
        for name, compiled in ((EAGER, False), (OURS, True)):
            output.progress.print(f"{name}: preparing")
            handlers[name], threads[name] = started(folder, size, steps, compiled=compiled)
        result = {"width": width, "size": size, "steps": steps, **measure(handlers, threads, size, steps, pictures)}
        summary = handlers[OURS].report.summary
        result |= {"coverage": summary.coverage, "graphs": summary.graphs, "fallbacks": summary.fallbacks}
    show(result)
    output.write_json(json_path, result)


if __name__ == "__main__":
    typer.run(main)
