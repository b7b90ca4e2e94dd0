"""The baseline of generation_checks.py: OpenVINO GenAI in a handler as users write it by hand."""

from typing import Any

from ts.context import Context
from ts.torch_handler.base_handler import BaseHandler


class PlainGenerator(BaseHandler):
    """A prompt in, the tokens that follow out."""

    def initialize(self, context: Context) -> None:
        """Loads an exported model; nothing is compared."""
        import openvino_genai
        import transformers

        settings = context.model_yaml_config["handler"]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(settings["tokenizer"])
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.num_kv_blocks = 0, 512
        properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 2}
        self.pipe = openvino_genai.ContinuousBatchingPipeline(settings["exported"], scheduler, "CPU", properties)
        self.context = context
        self.initialized = True

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[Any]:
        """Answers one request."""
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.eos_token_id, config.stop_token_ids = data[0]["body"]["max_tokens"], 2, {2}
        ids = self.tokenizer(data[0]["body"]["prompt"])["input_ids"]
        (result,) = self.pipe.generate([openvino.Tensor(np.array([ids], dtype=np.int64))], [config])
        return [{"tokens": list(result.m_generation_ids[0])}]
