"""Handlers in the forms of TorchServe's examples: own weights by `--extra-files`, no model file, other attributes."""

# As the diffusers example: no `self.model`, an `__init__` of its own, a pipeline that is called as a whole.
DIFFUSERS = """
import os
from abc import ABC
import numpy as np
import torch
from diffusers import DiffusionPipeline
from ts.torch_handler.base_handler import BaseHandler

class Diffusers(BaseHandler, ABC):
    def __init__(self):
        self.initialized = False

    def initialize(self, ctx):
        self.manifest, folder = ctx.manifest, ctx.system_properties["model_dir"]
        self.pipe = DiffusionPipeline.from_pretrained(os.path.join(folder, "pipeline"))
        self.pipe.set_progress_bar_config(disable=True)
        self.initialized = True

    def preprocess(self, requests):
        texts = [each.get("data") or each.get("body") for each in requests]
        return [text.decode() if isinstance(text, (bytes, bytearray)) else text for text in texts]

    def inference(self, texts):
        torch.manual_seed(len(texts[0]))
        return self.pipe(texts, guidance_scale=5.0, num_inference_steps=3, height=32, width=32, MORE).images

    def postprocess(self, pictures):
        return [np.array(each).tolist() for each in pictures]
"""
# As the wav2vec2 example: no BaseHandler, all of it in `handle`, one recording at a time, of any length.
WAV2VEC2 = """
import io
import soundfile
import torch
from transformers import AutoModelForCTC, AutoProcessor

class SpeechToText:
    def __init__(self):
        self.model = self.processor = self.manifest = None
        self.initialized = False
        self.rate = 16_000

    def initialize(self, context):
        self.manifest = context.manifest
        folder = context.system_properties["model_dir"]
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForCTC.from_pretrained(folder)
        self.initialized = True

    def handle(self, data, context):
        samples, rate = soundfile.read(io.BytesIO(data[0].get("data") or data[0].get("body")), dtype="float32")
        assert rate == self.rate
        inputs = self.processor(samples, sampling_rate=rate, return_tensors="pt").input_values
        return [self.processor.decode(self.model(inputs)[0].argmax(-1)[0])]
"""
# As the SpeechT5 example: three attributes, and a method that runs until the model says that it is done.
SPEECHT5 = """
import os
import torch
from transformers import SpeechT5ForTextToSpeech, SpeechT5HifiGan
from ts.torch_handler.base_handler import BaseHandler

class TextToSpeech(BaseHandler):
    def __init__(self):
        self.model = self.vocoder = self.speaker = None

    def initialize(self, ctx):
        folder = ctx.system_properties["model_dir"]
        self.model = SpeechT5ForTextToSpeech.from_pretrained(os.path.join(folder, "speech"))
        self.vocoder = SpeechT5HifiGan.from_pretrained(os.path.join(folder, "vocoder"))
        self.speaker = torch.linspace(-1, 1, 16)[None]

    def preprocess(self, requests):
        assert len(requests) == 1, "one text at a time"
        text = requests[0].get("data") or requests[0].get("body")
        return torch.tensor([[4 + byte % 28 for byte in bytes(text)]])

    def inference(self, ids):
        torch.manual_seed(0)
        return self.model.generate_speech(ids, self.speaker, vocoder=self.vocoder, maxlenratio=2.0)

    def postprocess(self, wave):
        return [wave.tolist()]
"""
# As the package that the SegmentAnything example imports: a predictor, which is no module, around the model.
PREDICTOR = """
import torch

class Predictor:
    def __init__(self, model):
        self.model = model

    def set_image(self, pixels):
        self.embedding = self.model.get_image_embeddings(pixels)

    def predict(self, point):
        points = torch.tensor([[[point]]], dtype=torch.float32)
        return self.model(image_embeddings=self.embedding, input_points=points, multimask_output=False).pred_masks
"""
SEGMENT_ANYTHING = """
import io
import numpy as np
import torch
from PIL import Image
from transformers import SamModel
from ts.torch_handler.base_handler import BaseHandler
import own_predictor

class SegmentAnything(BaseHandler):
    def __init__(self):
        super().__init__()
        self.predictor = None
        self.initialized = False

    def initialize(self, ctx):
        self.predictor = own_predictor.Predictor(SamModel.from_pretrained(ctx.system_properties["model_dir"]).eval())
        self.initialized = True

    def preprocess(self, requests):
        assert len(requests) == 1, "one picture at a time"
        picture = Image.open(io.BytesIO(requests[0].get("data") or requests[0].get("body"))).convert("RGB")
        return torch.from_numpy(np.array(picture.resize((64, 64)))).permute(2, 0, 1)[None] / 255

    @torch.no_grad()
    def inference(self, pixels):
        self.predictor.set_image(pixels)
        return self.predictor.predict([20.0, 30.0])

    def postprocess(self, masks):
        return masks.flatten(0, -2).tolist()[:1]
"""

# As the Hugging Face examples that generate: prompts of different lengths, padded on the left, in one call.
GENERATES = """
import json
import torch, transformers
from ts.torch_handler.base_handler import BaseHandler

class Generates(BaseHandler):
    def initialize(self, ctx):
        self.model = transformers.AUTO.from_pretrained(ctx.system_properties["model_dir"])
        self.initialized = True

    def preprocess(self, requests):
        asked = [json.loads(each.get("data") or each.get("body")) for each in requests]
        longest = max(len(each["ids"]) for each in asked)
        ids = torch.zeros(len(asked), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(asked):
            start = longest - len(each["ids"])
            ids[row, start:], mask[row, start:] = torch.tensor(each["ids"]), 1
        return ids, mask, asked[0].get("more", {})

    @torch.inference_mode()
    def inference(self, asked):
        ids, mask, more = asked
        more = {name: torch.tensor(each) if isinstance(each, list) else each for name, each in more.items()}
        return self.model.generate(ids, attention_mask=mask, pad_token_id=0, **{"max_new_tokens": 6, **more})

    def postprocess(self, found):
        return found.tolist() if isinstance(found, torch.Tensor) else found.sequences.tolist()
"""
# As Whisper in transformers' own examples.
LISTENS = """
import io
import soundfile
import transformers
from ts.torch_handler.base_handler import BaseHandler

class Listens(BaseHandler):
    def initialize(self, ctx):
        folder = ctx.system_properties["model_dir"]
        self.model = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
        self.processor = transformers.WhisperProcessor.from_pretrained(folder)
        self.initialized = True

    def preprocess(self, requests):
        sounds = [soundfile.read(io.BytesIO(each.get("data") or each.get("body")))[0] for each in requests]
        return self.processor(sounds, sampling_rate=16_000, return_tensors="pt").input_features

    def inference(self, features):
        return self.model.generate(features, language="en", max_new_tokens=8)

    def postprocess(self, found):
        return found.tolist()
"""


def speech_folder(folder) -> None:
    """Saves a small SpeechT5 and its vocoder."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.SpeechT5Config(
        vocab_size=32, hidden_size=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, speech_decoder_prenet_units=16,
        num_mel_bins=8, speaker_embedding_dim=16, speech_decoder_postnet_units=16, max_speech_positions=100,
        max_text_positions=60,
    )  # fmt: skip
    transformers.SpeechT5ForTextToSpeech(config).eval().save_pretrained(folder / "speech")
    vocoder = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8, upsample_initial_channel=16, upsample_rates=[4, 4], upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]],
    )  # fmt: skip
    transformers.SpeechT5HifiGan(vocoder).eval().save_pretrained(folder / "vocoder")


def sam_folder(folder) -> None:
    """Saves a small SegmentAnything."""
    import torch
    import transformers

    torch.manual_seed(0)
    vision = {
        "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64,
        "patch_size": 16, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 8, "mlp_dim": 24,
        "initializer_range": 0.3,
    }  # fmt: skip
    prompts = {"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4}
    masks = {
        "hidden_size": 16, "mlp_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 16
    }  # fmt: skip
    config = transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=masks)
    transformers.SamModel(config).eval().save_pretrained(folder)
    (folder / "own_predictor.py").write_text(PREDICTOR)
