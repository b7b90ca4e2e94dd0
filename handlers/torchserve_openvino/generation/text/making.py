"""Finds the exported model and the reference of its proof in the cache, or makes them."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import openvino as ov
from torch import nn

from torchserve_openvino.backend.runtime.build import device_facts
from torchserve_openvino.backend.runtime.crashes.journal import journal_in
from torchserve_openvino.cache.identity.key import RUN_PROPERTIES, digest, make_key
from torchserve_openvino.cache.identity.versions import source_digest, versions
from torchserve_openvino.cache.open import state_folder
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.errors import CompileDiedError, DamagedEntryError, ModelLoadError
from torchserve_openvino.generation.text.engine_settings import EngineSettings, end_tokens, properties
from torchserve_openvino.generation.text.expected import Expected, Nearness, expect, nearness, proof_prompts
from torchserve_openvino.generation.text.exporting import artifact
from torchserve_openvino.generation.text.exporting.architecture import bounds, length_of
from torchserve_openvino.generation.text.exporting.artifact import Facts
from torchserve_openvino.generation.text.exporting.exported_language_model import export
from torchserve_openvino.generation.text.exporting.weights import compressed, format_of
from torchserve_openvino.generation.text.generation_proof import GenerationProof
from torchserve_openvino.passes.ov.gated_products import dies_on_gated_products, split_gated_products
from torchserve_openvino.passes.pass_context import PassContext
from torchserve_openvino.quantized.checkpoint import Checkpoint
from torchserve_openvino.quantized.pack_linears import formats_of, name_weights, pack_linears
from torchserve_openvino.quantized.scheme import scheme_of
from torchserve_openvino.report.progress import begin_step
from torchserve_openvino.serving.loading.hub import load_config, load_model, read_config

logger = logging.getLogger(__name__)


class Making:
    """The exported model of a folder, and the reference of its proof.

    Args:
        settings: What to open.
        store: The cache; None without.

    Attributes:
        weights: The format of the weights, as the report names it: ``f32``, ``int8``, ``gptq-int4`` and so on.
        model_from_cache: Whether nothing was traced or converted.
        proof_from_cache: Whether eager PyTorch did not run.
        expected: What eager PyTorch generated; empty if nothing is compared.
        nearness: How near the exported model's logits come; None if nothing is compared.

    Raises:
        ModelLoadError: The folder's configuration can't be read, or names a way to quantize that is not supported.
        ConfigError: Its weights are quantized, and should be so again.
    """

    def __init__(self, settings: EngineSettings, store: Store | None) -> None:
        self.settings, self.store = settings, store
        self._scheme = scheme_of(read_config(settings.folder))
        self.weights = format_of(settings.section, self._scheme)
        own = self.weights if self._keeps_packed else ""
        self._splits = dies_on_gated_products(properties(settings))
        self._fields = artifact.fields_of(artifact.folder_digest(settings.folder), settings.section, own, self._splits)
        self._key = make_key(artifact.KIND, self._fields)
        self._model: nn.Module | None = None
        self.model_from_cache = self.proof_from_cache = False
        self.expected: list[Expected] = []
        self.nearness: Nearness | None = None
        self._proof_key = ""

    @property
    def stored(self) -> bool:
        """Whether the exported model is in the cache."""
        return artifact.load(self.store, self._fields) is not None

    @property
    def _keeps_packed(self) -> bool:
        """Whether the weights stay as the checkpoint packs them."""
        return self._scheme is not None and self.weights == self._scheme.name

    @property
    def rounded_to(self) -> str:
        """The format that makes the model differ from its reference in eager PyTorch.

        That has the very weights of a packed checkpoint, so that nothing is rounded but the inputs of layers.
        """
        if not self._keeps_packed:
            return self.weights
        return "int8" if self.settings.section.dynamic_quantization else "f32"

    @contextlib.contextmanager
    def ready(self) -> Iterator[tuple[Path, Facts]]:
        """Yields the exported model in a folder for OpenVINO GenAI, and what is known of it."""
        with contextlib.ExitStack() as stack:
            if self.store is not None:
                # The workers of a model start together: one makes it, the others wait.
                begin_step("looking for the exported model in the cache, or waiting for another worker that makes it")
                stack.enter_context(self.store.lock(artifact.KIND, self._key))
            stored = self._stored(stack)
            self.model_from_cache = stored is not None
            yield stored if stored is not None else self._made(stack)

    def _stored(self, stack: contextlib.ExitStack) -> tuple[Path, Facts] | None:
        loaded = artifact.load(self.store, self._fields)
        if loaded is None:
            return None
        entry, facts = loaded
        try:
            return stack.enter_context(artifact.as_folder(entry)), facts
        except (DamagedEntryError, OSError) as error:
            logger.warning("A stored language model cannot be used and is made again: %s", error)
            return None

    def _made(self, stack: contextlib.ExitStack) -> tuple[Path, Facts]:
        config = load_config(self.settings.folder)
        # Refused before its weights are loaded.
        length_of(config, self.settings.section.max_length)
        eager = self._eager_model()
        begin_step("exporting the model")
        exported = export(eager)
        begin_step(f"writing the weights in {self.weights}")
        name_weights(
            exported.model, ((name, parameter.detach().numpy()) for name, parameter in eager.named_parameters())
        )
        if self._splits:
            split_gated_products(exported.model, PassContext())
        smaller, how = self._compressed(exported.model)
        facts = Facts(
            exported.layers, exported.vocabulary, exported.operators, {**how, **formats_of(smaller)},
            config.model_type, dict(bounds(config)),
        )  # fmt: skip
        folder = stack.enter_context(artifact.temporary_folder())
        ov.save_model(smaller, artifact.model_path(folder), compress_to_fp16=False)
        artifact.save(self.store, self._fields, folder, facts)
        return folder, facts

    def _compressed(self, model: ov.Model) -> tuple[ov.Model, dict[str, Any]]:
        settings, scheme = self.settings, self._scheme
        if scheme is None or not self._keeps_packed:
            return compressed(model, self.weights, settings.section.group_size)
        pack_linears(model, Checkpoint(settings.folder, scheme).layers())
        return model, {"group_size": scheme.group_size}

    def refer(self, folder: Path, facts: Facts, length: int) -> None:
        """Finds or makes the reference of the proof, then frees the eager model.

        Args:
            folder: As `ready` yields.
            facts: As `ready` yields.
            length: Longest sequence of the engine.

        Raises:
            ConfigError: A prompt of the configuration is too long.
            ModelLoadError: OpenVINO's compiler dies of the model.
        """
        try:
            if self.settings.verify.against != "off":
                self._refer(folder, facts, length)
        finally:
            self._model = None

    def _refer(self, folder: Path, facts: Facts, length: int) -> None:
        settings = self.settings
        prompts, count = proof_prompts(
            settings.prompts, settings.section.proof_tokens, length, facts.vocabulary, end_tokens(settings.folder)
        )
        fields = self._proof_fields(prompts, count)
        self._proof_key = proof_key = make_key("proof", fields)
        entry = self.store.get("proof", proof_key) if self.store is not None else None
        if entry is not None:
            try:
                self.expected = [Expected.of_plain(one) for one in entry.body["expected"]]
                self.nearness = Nearness.of_plain(entry.body["logits"])
                self.proof_from_cache = True
                return
            except (LookupError, TypeError, ValueError) as error:
                logger.warning("A stored reference of a proof cannot be used and is made again: %s", error)
        model = self._eager_model()
        self.expected = expect(model, prompts, count)
        journal = journal_in(state_folder(self.store))
        exported = artifact.model_path(folder)
        try:
            self.nearness = nearness(model, exported, prompts, settings.device, properties(settings), journal)
        except CompileDiedError as error:
            raise ModelLoadError(str(error)) from error
        if self.store is not None:
            body = {
                "expected": [{"prompt": e.prompt, "tokens": e.tokens, "rivals": e.rivals} for e in self.expected],
                "logits": self.nearness.to_plain(),
            }
            self.store.put("proof", proof_key, fields=fields, body=body)

    def verdict(self) -> GenerationProof | None:
        """Returns the proof that passed here before, with the same engine; None if there is none, or no cache."""
        fields = self._verdict_fields()
        entry = self.store.get("verdict", make_key("verdict", fields)) if self.store is not None else None
        try:
            return GenerationProof.of_plain(entry.body) if entry is not None else None
        except (LookupError, TypeError, ValueError) as error:
            logger.warning("A stored proof cannot be used: %s", error)
            return None

    def keep(self, proof: GenerationProof) -> None:
        """Stores a proof that passed."""
        if self.store is not None:
            fields = self._verdict_fields()
            self.store.put("verdict", make_key("verdict", fields), fields=fields, body=proof.to_dict())

    def _verdict_fields(self) -> dict[str, Any]:
        settings, section = self.settings, self.settings.section
        return {
            **versions(),
            "proof": self._proof_key,
            "engine": source_digest("generation/text"),
            "openvino_genai": metadata.version("openvino-genai"),
            "section": [section.step_tokens, section.shares_prefixes, section.prompt_lookup_tokens],
            "verify": digest([settings.verify.min_cosine, settings.verify.max_abs, settings.verify.min_top1]),
        }

    def _proof_fields(self, prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        device = self.settings.device
        facts = device_facts(device)
        config = {name: str(v) for name, v in properties(self.settings).items() if name not in RUN_PROPERTIES}
        return {
            **versions(),
            "generator": self._key,
            "prompts": digest([[list(prompt) for prompt in prompts], count]),
            "device": device,
            "device_name": facts["names"],
            "capabilities": {name: value for name, value in facts.items() if name != "names"},
            "ov_config": config,
        }

    def _eager_model(self) -> nn.Module:
        if self._model is None:
            begin_step("loading the weights into PyTorch")
            self._model = load_model(self.settings.folder, "AutoModelForCausalLM").float()
        return self._model
