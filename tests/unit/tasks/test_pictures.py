"""Pictures of small pipelines, against diffusers' own in eager PyTorch."""

import io
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from picture_worker import eager, eager_pipeline, farthest, opened, started
from vision_worker import encoded, photo, text

from diffusion_models import pipeline_folder
from torchserve_openvino.generation.images.pictures import SCHEDULERS

# Each pipeline takes half a minute to start.
pytestmark = pytest.mark.slow

PIPELINES = {"sd": "StableDiffusion", "xl": "StableDiffusionXL", "sd3": "StableDiffusion3"}
GRAPHS = {
    "sd": {"text_encoder", "unet", "vae.decode", "vae.encode"},
    "xl": {"text_encoder", "text_encoder_2", "unet", "vae.decode", "vae.encode"},
    "sd3": {"text_encoder", "text_encoder_2", "text_encoder_3", "transformer", "vae.decode", "vae.encode"},
}


@pytest.fixture(scope="module", params=["sd", "xl", "sd3"])
def served(request, tmp_path_factory) -> tuple[str, Any]:
    place = tmp_path_factory.mktemp(request.param)
    return request.param, started(place, pipeline_folder(request.param, place / "saved"), sizes=["32x32"])


def made(worker: Any, **body: Any) -> Any:
    answer = worker.one(body)
    assert worker.status() == 200 and isinstance(answer, bytes), answer
    return opened(answer)


def test_a_picture_is_eagers(served) -> None:
    kind, worker = served
    for guidance, more in ((5.0, {"negative_prompt": "a dog"}), (1.0, {})):
        picture = made(worker, prompt="a cat", seed=7, steps=4, guidance=guidance, **more)
        expected = eager(
            worker.folder, f"{PIPELINES[kind]}Pipeline", 7, prompt="a cat", num_inference_steps=4,
            guidance_scale=guidance, width=32, height=32, **more,
        )  # fmt: skip
        assert farthest(picture, expected) <= 1


def test_each_component_is_one_graph_for_each_of_its_shapes(served) -> None:
    kind, worker = served
    for steps in (1, 2, 5):
        made(worker, prompt=f"{steps} cats", steps=steps)
    refused = worker.one({"prompt": "a", "guidance": 1, "negative_prompt": "b"})
    assert worker.status() == 400 and "negative_prompt needs guidance above 1" in refused["message"]
    report = worker.report()
    worker.ran_compiled()
    components = report["config"]["components"]
    assert {name.partition(" ")[0] for name in components} == GRAPHS[kind]
    for name, facts in components.items():
        batches = 2 if name.startswith(("unet", "transformer")) else 1
        assert facts["graphs"] == facts["partitions"] == batches, (name, facts)
        assert facts["coverage"] == 1.0 and facts["fallbacks"] == 0 and facts["ops_total"] > 0
        assert report["verify"]["parts"][name]["passed"]
    assert report["summary"]["graph_breaks"] == 0
    assert report["serving"]["compiles_after_ready"] == 0


def test_a_picture_of_a_picture_is_eagers(served) -> None:
    kind, worker = served
    start, mask = photo(32, 32), photo(32, 32, 1).convert("L").point(lambda value: 255 * (value > 127))
    picture = made(worker, prompt="a cat", image=text(start), strength=0.6, seed=3, steps=5, guidance=4.0)
    same = {"prompt": "a cat", "num_inference_steps": 5, "guidance_scale": 4.0, "image": start}
    expected = eager(worker.folder, f"{PIPELINES[kind]}Img2ImgPipeline", 3, strength=0.6, **same)
    assert farthest(picture, expected) <= 1
    inside = made(
        worker, prompt="a cat", image=text(start), mask_image=text(mask), strength=0.8, seed=3, steps=5, guidance=4.0
    )
    size = {"width": 32, "height": 32}
    expected = eager(
        worker.folder, f"{PIPELINES[kind]}InpaintPipeline", 3, strength=0.8, mask_image=mask, **same, **size
    )
    assert farthest(inside, expected) <= 1 and farthest(inside, picture) > 1
    assert worker.report()["serving"]["compiles_after_ready"] == 0


def test_each_scheduler_makes_eagers_picture(served) -> None:
    kind, worker = served
    names = worker.report()["task"]["limits"]["schedulers"]
    assert len(names) == (1 if kind == "sd3" else 8)
    pipe = eager_pipeline(worker.folder, f"{PIPELINES[kind]}Pipeline")
    own = pipe.scheduler.config
    for name in names:
        pipe.scheduler = getattr(diffusers, SCHEDULERS[name]).from_config(own)
        picture = made(worker, prompt="a cat", seed=1, steps=4, guidance=3.0, scheduler=name)
        expected = pipe(
            "a cat", num_inference_steps=4, guidance_scale=3.0, width=32, height=32,
            generator=torch.Generator().manual_seed(1),
        ).images[0]  # fmt: skip
        assert farthest(picture, expected) <= 1, name
    assert worker.report()["serving"]["compiles_after_ready"] == 0


def test_stable_diffusion_2(tmp_path: Path) -> None:
    folder = pipeline_folder("sd2", tmp_path / "saved")
    worker = started(tmp_path, folder, sizes="auto", guided="always", image_to_image=False)
    picture = made(worker, prompt="a cat", seed=2, steps=4)
    expected = eager(folder, "StableDiffusionPipeline", 2, prompt="a cat", num_inference_steps=4, width=32, height=32)
    assert farthest(picture, expected) <= 1
    worker.ran_compiled()
    refused = worker.one({"prompt": "a cat", "image": text(photo(32, 32))})
    assert worker.status() == 400 and "image_to_image: false" in refused["message"]


def test_stable_diffusion_3_without_t5(tmp_path: Path) -> None:
    worker = started(tmp_path, pipeline_folder("sd3", tmp_path / "saved", with_t5=False), sizes="auto", guided="never")
    picture = made(worker, prompt="a cat", seed=2, steps=2)
    expected = eager(
        worker.folder, "StableDiffusion3Pipeline", 2, prompt="a cat", num_inference_steps=2, guidance_scale=1.0,
        width=32, height=32,
    )  # fmt: skip
    assert farthest(picture, expected) <= 1
    worker.ran_compiled()


def test_a_denoiser_that_reads_masks_only_fills_them(tmp_path: Path) -> None:
    worker = started(tmp_path, pipeline_folder("inpaint", tmp_path / "saved"), sizes="auto", guided="always")
    start, mask = photo(32, 32), photo(32, 32, 1).convert("L").point(lambda value: 255 * (value > 127))
    refused = worker.one({"prompt": "a cat"})
    assert worker.status() == 400 and "only fills masks" in refused["message"]
    picture = made(worker, prompt="a cat", image=text(start), mask_image=text(mask), seed=3, steps=4, strength=1.0)
    expected = eager(
        worker.folder, "StableDiffusionInpaintPipeline", 3, prompt="a cat", image=start, mask_image=mask, width=32,
        height=32, num_inference_steps=4, guidance_scale=7.5, strength=1.0,
    )  # fmt: skip
    assert farthest(picture, expected) <= 1


def test_eager_pytorch_serves_as_well(tmp_path: Path) -> None:
    from serving_worker import Archive

    from torchserve_openvino.tasks.pictures.handler import ImageGenerator

    folder = pipeline_folder("sd", tmp_path / "hub")
    config = {"pt2": {"compile": {"enable": False}}, "handler": {"openvino": {"image_generation": {"max_steps": 4}}}}
    archive = Archive(tmp_path, config, None)
    handler = ImageGenerator()
    handler.initialize(archive.context)
    (answer,) = archive.handle(handler, {"prompt": "a cat", "seed": 7, "steps": 2})
    expected = eager(folder, "StableDiffusionPipeline", 7, prompt="a cat", num_inference_steps=2, width=32, height=32)
    assert farthest(opened(answer), expected) == 0
    buffer = io.BytesIO(answer)
    assert opened(buffer.getvalue()).text == {"seed": "7"} and encoded(expected) != answer
