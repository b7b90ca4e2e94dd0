"""Language models for generation_checks.py: made, packed, served, and asked over REST.

The tokenizer is a byte-level one without merges, and models generate visible ASCII characters only: so the text of an
answer shows its tokens, whatever class transformers loads the tokenizer with.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from server import TorchServeProcess

# Three special tokens, and one for each byte; those of the visible characters, '!' to '~', come first.
VOCABULARY = 3 + 256
_FIRST, _LAST = 3, 3 + ord("~") - ord("!")
_TEMPLATE = Path(__file__).resolve().parents[3] / "model-config" / "text-generation.yaml"
Tokens = tuple[int, ...]


def model_of(kind: str, *, features: int = 64, layers: int = 2, length: int = 2048) -> Any:
    """A language model with random weights whose most probable tokens are well apart, in eval mode.

    Args:
        kind: ``llama`` (grouped-query attention), ``qwen2`` or ``gpt2``.
        features: Of a token.
        layers: How many.
        length: Longest sequence in tokens.
    """
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3
    }  # fmt: skip
    if kind == "gpt2":
        sizes = {"n_embd": features, "n_layer": layers, "n_head": 4, "n_positions": length}
        config: Any = transformers.GPT2Config(**sizes, **common)
    else:
        config_class = transformers.LlamaConfig if kind == "llama" else transformers.Qwen2Config
        config = config_class(
            hidden_size=features, intermediate_size=2 * features, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=length, **common,
        )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        # Tokens that an answer's text does not show one by one are never the most probable ones.
        weight = model.get_output_embeddings().weight
        weight[:_FIRST] = 0
        weight[_LAST + 1 :] = 0
    return model


def save(model: Any, folder: Path) -> None:
    """Writes a model with its tokenizer, as `save_pretrained` does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(models.BPE({letter: token for token, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)


def text_of(tokens: Tokens) -> str:
    """The text of tokens."""
    return "".join(chr(token - _FIRST + ord("!")) for token in tokens)


def tokens_of(text: str) -> Tokens:
    """The tokens of a text."""
    return tuple(ord(letter) - ord("!") + _FIRST for letter in text)


def answer_of(answer: httpx.Response) -> Tokens:
    """The tokens of an answer. Raises RuntimeError for a refusal."""
    if answer.status_code != 200:
        raise RuntimeError(f"status {answer.status_code}: {answer.text[:500]}")
    return tokens_of(answer.json()["text"])


def drawn(draw: Any, length: int) -> Tokens:
    """Random tokens of visible characters."""
    return tuple(draw.randint(_FIRST, _LAST) for _ in range(length))


def greedy(model: Any, prompt: Tokens, count: int) -> Tokens:
    """What transformers' own generate adds to a prompt."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    return tuple(tokens[0, len(prompt) :].tolist())


class Served:
    """A model in a running TorchServe.

    Args:
        server: Runs.
        name: The model's.
    """

    def __init__(self, server: TorchServeProcess, name: str) -> None:
        self.server, self.name = server, name
        self.http = httpx.Client(
            base_url=f"{server.inference_url}/predictions/{name}", timeout=300, trust_env=False,
            limits=httpx.Limits(max_connections=64),
        )  # fmt: skip

    def body(self, prompt: Tokens, count: int, **more: Any) -> dict[str, Any]:
        """A request that generates ``count`` tokens."""
        return {"prompt": text_of(prompt), "max_tokens": count, "ignore_eos": True, **more}

    def ask(self, prompt: Tokens, count: int, **more: Any) -> httpx.Response:
        """Asks, and waits for the answer."""
        return self.http.post("", json=self.body(prompt, count, **more))

    def describe(self) -> dict[str, Any]:
        """The worker's report."""
        return self.server.describe(self.name)


@contextmanager
def served(model: Any, name: str, work: Path, **generate: Any) -> Iterator[Served]:
    """Packs a model, and serves it from the template with some of `handler.openvino.generate` changed."""
    folder, store = work / f"{name}-model", work / f"{name}-store"
    save(model, folder)
    store.mkdir()
    pack(folder, name, store, work / "cache", **generate)
    # A test of thousands of requests must not be stopped by the frontend's own queue.
    models, properties = {name: f"{name}.mar"}, {"job_queue_size": "2000"}
    with TorchServeProcess(store, models=models, properties=properties, patched=True) as server:
        server.wait_ready(name, timeout=900)
        try:
            yield Served(server, name)
        except httpx.HTTPError:
            # The logs go with the server.
            print(server.log_tail(), file=sys.stderr)
            raise


def pack(folder: Path, name: str, store: Path, cache: Path, **generate: Any) -> None:
    """Packs a Hugging Face folder with the template, some of whose `handler.openvino.generate` is changed."""
    settings = yaml.safe_load(_TEMPLATE.read_text(encoding="utf-8"))
    settings["handler"]["openvino"]["generate"] |= generate
    settings["pt2"]["compile"]["options"]["cache_dir"] = str(cache)
    config = store.parent / f"{name}.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    command: list[Any] = [
        sys.executable, "-m", "torchserve_openvino.cli", "package", "--hf", folder, "--task", "text_generator",
        "--model-name", name, "--export-path", store, "--config-file", config,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
