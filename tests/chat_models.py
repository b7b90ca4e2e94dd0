"""Small language models with random weights, saved as `save_pretrained` does, with a tokenizer trained here."""

import functools
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('there is no role ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPTS = [
    "TorchServe",
    "A model is served",
    "Each key is declared once, with type, default, bounds and help.",
    "Ünïcode — 数, 🙂 and 👩‍👩‍👧",
    "x",
    "Imports go one way, and the backend knows nothing of it. " * 3,
    "The cache: compiled once, started warm",
    "1, 2, 3, 5, 8, 13, 21, 34",
]


@functools.cache
def tokenizer(*, chats: bool = True) -> Any:
    """A byte-level BPE, as GPT-2's and Llama 3's, trained on a page that does not change: models depend on it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator((ROOT / "LICENSE").read_text(encoding="utf-8").splitlines(), trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    if chats:
        found.chat_template = TEMPLATE
    return found


def language_model(folder: Path, kind: str = "llama", *, chats: bool = True, length: int = 512) -> Path:
    """Saves a model of texts of ``length``, whose most probable tokens are well apart, and its tokenizer."""
    import transformers

    words = tokenizer(chats=chats)
    common = {"vocab_size": len(words), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    if kind == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=length, initializer_range=0.3, **common,
        )  # fmt: skip
        model: Any = transformers.LlamaForCausalLM(config)
    else:
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": length}
        config = transformers.GPT2Config(initializer_range=0.3, **sizes, **common)
        model = transformers.GPT2LMHeadModel(config)
    model.eval().save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def text_to_text_model(folder: Path) -> Path:
    """Saves a tiny T5, whose prompt goes to an encoder, and a tokenizer without a template for chats."""
    from language_models import seq2seq

    words = tokenizer(chats=False)
    seq2seq("t5", vocab_size=len(words), d_model=64, d_kv=16).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def eager_tokens(folder: Path, prompt: str, most: int, *, ignore_eos: bool = False, **how: Any) -> list[int]:
    """What transformers' own generate adds to a prompt, greedily."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    encodes = _loaded(str(folder), AutoConfig).is_encoder_decoder
    model = _loaded(str(folder), AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM)
    words = _loaded(str(folder), AutoTokenizer)
    ids = words(prompt, return_tensors="pt", **how).input_ids
    end = {"eos_token_id": -1} if ignore_eos else {}
    with torch.no_grad():
        found = model.generate(ids, max_new_tokens=most, do_sample=False, pad_token_id=0, **end)
    # The answer of a model with an encoder begins with a token of its own, not with the prompt.
    return found[0, 1 if encodes else ids.shape[1] :].tolist()


@functools.cache
def _loaded(folder: str, kind: Any) -> Any:
    return kind.from_pretrained(folder)


def text_of(tokens: list[int]) -> str:
    """The text of tokens, without half a character at the end."""
    return tokenizer().decode(tokens, skip_special_tokens=True).rstrip("\ufffd")
