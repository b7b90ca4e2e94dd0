"""The baseline of embedding.py: MiniLM in a handler as users write it by hand. The archiver packs this one file."""

import json
import os
from typing import Any

import torch
from ts.context import Context
from ts.torch_handler.base_handler import BaseHandler


class PlainEmbedder(BaseHandler):
    """Texts in, the mean of their token vectors with length 1 out."""

    def initialize(self, context: Context) -> None:
        """Loads the model and its tokenizer; a tuned worker's threads are its share of the cores."""
        import transformers

        settings = context.model_yaml_config["handler"]
        if settings["divide_threads"]:
            workers = int(context.model_yaml_config["maxWorkers"])
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(settings["folder"])
        self.model = transformers.AutoModel.from_pretrained(settings["folder"]).eval()
        self.context = context
        self.initialized = True

    def preprocess(self, data: list[dict[str, Any]]) -> Any:
        """Requests to one batch, padded to its longest text."""
        bodies = [item.get("data") or item["body"] for item in data]
        texts = [(body if isinstance(body, dict) else json.loads(bytes(body)))["inputs"] for body in bodies]
        return self.tokenizer(texts, padding=True, return_tensors="pt")

    def inference(self, data: Any) -> torch.Tensor:
        """Token vectors to the vectors of texts."""
        with torch.inference_mode():
            tokens = self.model(**data).last_hidden_state
            mask = data["attention_mask"].unsqueeze(-1)
            return torch.nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1))

    def postprocess(self, data: torch.Tensor) -> list[list[float]]:
        """Tensors to JSON."""
        vectors: list[list[float]] = data.tolist()
        return vectors
