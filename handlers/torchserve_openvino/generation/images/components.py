"""Which graphs a pipeline has, and the inputs that each is compiled for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchserve_openvino.config.fields import PICTURE_SIZE
from torchserve_openvino.config.sections.openvino_section import WarmupInput
from torchserve_openvino.config.sections.task_sections import ImageGenerationSection
from torchserve_openvino.errors import ModelLoadError
from torchserve_openvino.generation.graph_calls import GraphCalls, SizedGraph
from torchserve_openvino.generation.images import pipeline_graphs
from torchserve_openvino.generation.images.loading import Loaded
from torchserve_openvino.generation.images.pipeline_graphs import StandIn

# --- sizes of pictures --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PictureSize:
    """Width and height in pixels; as text ``512x512``."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @classmethod
    def of(cls, text: str) -> "PictureSize":
        """Reads ``WIDTHxHEIGHT``.

        Raises:
            ValueError: It is something else.
        """
        match = PICTURE_SIZE.fullmatch(text.strip().lower())
        if match is None:
            raise ValueError(f"a size is width x height in pixels, such as 512x512, not {text[:40]!r}")
        return cls(int(match[1]), int(match[2]))


# --- which graphs a pipeline has, and the inputs that each is compiled for ----------------------------------------


# What diffusers passes to the T5 encoder of Stable Diffusion 3, in tokens.
T5_TOKENS = 256
# Longest time that schedulers pass, unless their configuration says otherwise.
_TIMES = 1000


class Components:
    """The models of a pipeline: stand-ins for them, and the graphs behind these.

    Args:
        loaded: The pipeline's models.

    Attributes:
        standing: A stand-in for each model, by its name in the pipeline.
        scale: Pixels of a picture for one value of the latents, along one side.
        unit: What width and height are multiples of.
        inpaints_only: Whether the denoiser also reads a mask, and so makes nothing without one.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._components = components = loaded.components
        self._transformer = components.get("transformer")
        self._denoiser: Any = self._transformer if self._transformer is not None else components["unet"]
        self._is_xl = "text_encoder_2" in components and self._transformer is None
        self._check()
        vae = components["vae"]
        self.scale: int = 2 ** (len(vae.config.block_out_channels) - 1)
        self.unit = self.scale * (int(self._transformer.config.patch_size) if self._transformer is not None else 1)
        self.inpaints_only = int(self._denoiser.config.in_channels) != int(vae.config.latent_channels)
        self.standing: dict[str, StandIn | None] = {}
        self._texts = {name: self._text(name) for name in components if name.startswith("text_encoder")}
        self._unet = self._denoiser_calls()
        self._decoder = GraphCalls(pipeline_graphs.VaeDecoderGraph(vae))
        self._encoder = GraphCalls(pipeline_graphs.VaeEncoderGraph(vae))
        self.standing["vae"] = pipeline_graphs.VaeStandIn(vae, {"decoder": self._decoder, "encoder": self._encoder})
        self._safety: GraphCalls | None = None
        if (checker := components.get("safety_checker")) is not None:
            self._safety = GraphCalls(pipeline_graphs.SafetyGraph(checker))
            self.standing["safety_checker"] = pipeline_graphs.SafetyStandIn(checker, {"safety": self._safety})

    def _check(self) -> None:
        """Refuses denoisers with inputs that the requests of this task do not have.

        Raises:
            ModelLoadError: It is one of those.
        """
        config = self._denoiser.config
        expected = {
            "time_cond_proj_dim": None, "class_embed_type": None, "num_class_embeds": None,
            "encoder_hid_dim_type": None, "addition_embed_type": "text_time" if self._is_xl else None,
        }  # fmt: skip
        for name, value in expected.items():
            if self._transformer is None and config.get(name) != value:
                raise ModelLoadError(f"unet/config.json: {name} is {config.get(name)!r}; served is {value!r} only.")
        for name, model in self._components.items():
            if name.startswith("text_encoder") and model is not None and _get(model, "use_attention_mask"):
                raise ModelLoadError(f"{name}/config.json: use_attention_mask is true, which is not served.")

    def _text(self, name: str) -> GraphCalls | None:
        encoder = self._components[name]
        if encoder is None:
            self.standing[name] = None
            return None
        # T5's last states are read; XL and 3 read the states before the last layer of CLIP.
        hidden = "text_encoder_2" in self._components and name != "text_encoder_3"
        calls = GraphCalls(pipeline_graphs.TextGraph(encoder, hidden=hidden))
        self.standing[name] = pipeline_graphs.TextStandIn(encoder, {"text": calls})
        return calls

    def _denoiser_calls(self) -> GraphCalls:
        if self._transformer is not None:
            calls = GraphCalls(pipeline_graphs.TransformerGraph(self._transformer))
            self.standing["transformer"] = pipeline_graphs.TransformerStandIn(self._transformer, {"denoiser": calls})
            return calls
        unet = self._components["unet"]
        calls = GraphCalls((pipeline_graphs.XLUnetGraph if self._is_xl else pipeline_graphs.UnetGraph)(unet))
        self.standing["unet"] = pipeline_graphs.UnetStandIn(unet, {"denoiser": calls})
        return calls

    @property
    def own_size(self) -> PictureSize:
        """The size that the model was made for."""
        side = self._denoiser.config.sample_size
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        return PictureSize(int(width) * self.scale, int(height) * self.scale)

    @property
    def denoiser(self) -> Any:
        """The unet or transformer."""
        return self._denoiser

    def sizes(self, section: ImageGenerationSection) -> list[PictureSize]:
        """Returns the sizes to compile.

        Raises:
            ModelLoadError: One is not a multiple of what the model needs.
        """
        sizes = [self.own_size] if section.sizes == "auto" else [PictureSize.of(text) for text in section.sizes]
        for size in sizes:
            if size.width % self.unit or size.height % self.unit:
                raise ModelLoadError(
                    f"handler.openvino.image_generation.sizes: {size} is not a multiple of {self.unit} pixels, which "
                    "this model needs."
                )
            longest = _get(self._denoiser, "pos_embed_max_size")
            if longest is not None and max(size.width, size.height) > int(longest) * self.unit:
                raise ModelLoadError(
                    f"handler.openvino.image_generation.sizes: {size} is larger than this model's positions, "
                    f"{int(longest) * self.unit} pixels."
                )
        return sizes

    def parts(self, sizes: Sequence[PictureSize], section: ImageGenerationSection) -> Iterator[SizedGraph]:
        """Yields what to compile: text encoders and safety checker once, the others for each size."""
        for name, calls in self._texts.items():
            if calls is not None:
                high = int(self._components[name].config.vocab_size)
                length = self._tokens(name)
                yield SizedGraph(
                    name, calls, [WarmupInput(name="ids", shape=[length], dtype="int64", low=0, high=high)]
                )
        batches = {"always": (2,), "never": (1,), "both": (1, 2)}[section.guided]
        for size in sizes:
            width, height = size.width // self.scale, size.height // self.scale
            sized = f" {size}" if len(sizes) > 1 else ""
            yield SizedGraph(f"{self._denoiser_name}{sized}", self._unet, self._denoiser_inputs(height, width), batches)
            latents = WarmupInput(name="latents", shape=[self._latents, height, width])
            yield SizedGraph(f"vae.decode{sized}", self._decoder, [latents])
            if section.image_to_image:
                pixels = WarmupInput(name="pixels", shape=[3, size.height, size.width], low=-1.0, high=1.0)
                yield SizedGraph(f"vae.encode{sized}", self._encoder, [pixels])
        if self._safety is not None:
            side = int(self._components["safety_checker"].config.vision_config.image_size)
            yield SizedGraph("safety_checker", self._safety, [WarmupInput(name="pixels", shape=[3, side, side])])

    @property
    def _denoiser_name(self) -> str:
        return "transformer" if self._transformer is not None else "unet"

    @property
    def _latents(self) -> int:
        return int(self._components["vae"].config.latent_channels)

    def _tokens(self, name: str) -> int:
        """Returns the length of a text encoder's input."""
        return T5_TOKENS if name == "text_encoder_3" else int(self._components[name].config.max_position_embeddings)

    def _denoiser_inputs(self, height: int, width: int) -> list[WarmupInput]:
        config: Mapping[str, Any] = self._denoiser.config
        times = int(_get(self._components["scheduler"], "num_train_timesteps") or _TIMES)
        sample = WarmupInput(name="sample", shape=[int(config["in_channels"]), height, width])
        timestep = WarmupInput(name="timestep", shape=[], low=0.0, high=float(times))
        length = self._tokens("text_encoder")
        if self._transformer is not None:
            # T5's states follow CLIP's; without T5, diffusers passes as many zeros.
            texts: list[int | str] = [length + T5_TOKENS, int(config["joint_attention_dim"])]
            pooled = WarmupInput(name="pooled_projections", shape=[int(config["pooled_projection_dim"])])
            return [sample, timestep, WarmupInput(name="encoder_hidden_states", shape=texts), pooled]
        inner = config["cross_attention_dim"]
        inner = int(inner[0] if isinstance(inner, (list, tuple)) else inner)
        inputs = [sample, timestep, WarmupInput(name="encoder_hidden_states", shape=[length, inner])]
        if self._is_xl:
            vector = int(self._components["text_encoder_2"].config.projection_dim)
            inputs.append(WarmupInput(name="text_embeds", shape=[vector]))
            # Sizes and places in pixels.
            inputs.append(WarmupInput(name="time_ids", shape=[6], low=0.0, high=1024.0))
        return inputs


def _get(model: Any, name: str) -> Any:
    """Returns an entry of a model's configuration, None where it has none."""
    config = model.config
    return config.get(name) if hasattr(config, "get") else getattr(config, name, None)
