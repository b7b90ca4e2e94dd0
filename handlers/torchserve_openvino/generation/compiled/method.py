"""Compiles the `generate` that a handler calls: `handler.openvino.compile: [model.generate]`."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchserve_openvino.config import ServingConfig
from torchserve_openvino.errors import ConfigError, ModelLoadError, OutsideDeclaredError, VerificationError
from torchserve_openvino.generation.compiled.arguments import Arguments
from torchserve_openvino.generation.compiled.compiled_generation import CompiledGeneration
from torchserve_openvino.generation.compiled.hf_adapter import with_compiled_forward
from torchserve_openvino.generation.compiled.layout import IDS, GraphSizes, model_input
from torchserve_openvino.generation.compiled.trials import Trials
from torchserve_openvino.generation.graph_calls import prepare_parts
from torchserve_openvino.generation.text.compiled_steps import check, places_of, sizes_of
from torchserve_openvino.serving.shapes.input_spec import Inputs
from torchserve_openvino.serving.worker_context import PreparedMethod, WorkerContext

logger = logging.getLogger(__name__)

_KEY = "handler.openvino.compile"
_OUTSIDE = "handler.openvino.batching.outside: compile"


class Generate:
    """Runs calls of a model's `generate` by compiled graphs.

    Args:
        model: The model; stays as it is.
        function: Its `generate`, as a function of the model.
        generation: The graphs.
        arguments: Reads calls.
        refuses: Whether a call that the graphs do not serve is refused; else it runs in eager PyTorch.
    """

    def __init__(
        self, model: nn.Module, function: Callable[..., Any], generation: CompiledGeneration, arguments: Arguments,
        *, refuses: bool,
    ) -> None:  # fmt: skip
        self._model, self._function = model, function
        self._generation, self._arguments, self._refuses = generation, arguments, refuses
        self._face = with_compiled_forward(generation)
        # The handler's calls are redirected on the model, and the face is a copy of it.
        vars(self._face).pop("generate", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a call.

        Raises:
            OutsideDeclaredError: The graphs do not serve it, and such calls are refused.
        """
        arguments = self._arguments.named(args, kwargs)
        if why := self._arguments.why_not(arguments, self._generation.sizes, self._generation.layout):
            if self._refuses:
                raise OutsideDeclaredError(
                    f"{why}; handler.openvino.batching.outside: compile serves it in eager PyTorch"
                )
            logger.warning("generate runs in eager PyTorch: %s", why)
            return self._function(self._model, *args, **kwargs)
        return self._function(self._face, *args, **kwargs)


def prepare_generate(
    model: Any, function: Callable[..., Any], seen: Sequence[Inputs], path: str, context: WorkerContext
) -> PreparedMethod:
    """Compiles the graphs of a model that generates, and compares what they generate with eager PyTorch.

    Args:
        model: A model of transformers.
        function: Its `generate`, as a function of the model.
        seen: Arguments of the calls that the samples showed.
        path: The method's path in the handler.
        context: What the worker knows; its tracker records everything for the report.

    Returns:
        What runs calls, and the graphs by name.

    Raises:
        ConfigError: A setting does not fit.
        ModelLoadError: The model, or a call that the samples showed, is not one that compiled graphs serve.
        VerificationError: They generate something else than eager PyTorch, and `verify.on_violation` is ``refuse``.
    """
    config, section, tracker = context.config, context.config.openvino.generate, context.tracker
    assert tracker is not None
    if config.backend is None:
        raise ConfigError(f"is {config.pt2.backend}; {_KEY}: [{path}] needs openvino.", key="pt2.compile.backend")
    if section.engine == "genai":
        raise ConfigError(
            f"is genai, which only the handler text_generator has; {_KEY}: [{path}] compiles. Remove it.",
            key="handler.openvino.generate.engine",
        )
    if section.proof_prompts:
        raise ConfigError(
            f"has texts, but {path} gets tokens: put them into files, and name these under warmup.samples.",
            key="handler.openvino.generate.proof_prompts",
        )
    check(section, config.backend.options.device)
    _check_model(model, path)
    arguments = Arguments(model, function)
    calls = [arguments.named(*call) for call in seen]
    generation = CompiledGeneration(model, _sizes(model, arguments, calls, path, context))
    refuses = config.openvino.batching.outside == "refuse"
    for call in calls:
        why = arguments.why_not(call, generation.sizes, generation.layout)
        if why and refuses:
            raise ModelLoadError(
                f"{_KEY} names {path!r}, but a sample's call cannot be compiled: {why}. Change the call or the size, "
                f"or remove {path!r}, or set {_OUTSIDE} to serve it in eager PyTorch."
            )
    parts = prepare_parts(generation.parts(), replace(context, config=_in_precision(config)), path)
    generate = Generate(model, function, generation, arguments, refuses=refuses)
    if config.openvino.verify.against != "off":
        trials = Trials(model, function, generate, generation, section.proof_tokens)
        served = [call for call in calls if not arguments.why_not(call, generation.sizes, generation.layout)]
        proof = trials.run(served, section.computation, config.openvino.verify)
        tracker.verify.state(proof.to_verify(), path)
        tracker.set_config("generate", {**_facts(generation), **proof.to_dict()})
        if not proof.passed:
            message = f"{path} differs from eager PyTorch: {'; '.join(proof.problems)}."
            if config.openvino.verify.on_violation == "refuse":
                raise VerificationError(message)
            logger.warning("%s", message)
    else:
        tracker.set_config("generate", _facts(generation))
    return PreparedMethod(generate, parts)


def _check_model(model: Any, path: str) -> None:
    name = type(model).__name__
    if model.training:
        raise ModelLoadError(f"{_KEY} names {path!r}, but {name} is in training mode: call eval() in initialize.")
    others = {str(parameter.dtype) for parameter in model.parameters() if parameter.dtype != torch.float32}
    if others:
        raise ModelLoadError(
            f"{_KEY} names {path!r}, but {name} has weights of {', '.join(sorted(others))}: load it in torch.float32; "
            "handler.openvino.generate.weights: bf16 computes in bf16."
        )


def _sizes(
    model: Any, arguments: Arguments, calls: Sequence[dict[str, Any]], path: str, context: WorkerContext
) -> GraphSizes:  # fmt: skip
    section = context.config.openvino.generate
    places = places_of(model.config, section.max_length)
    # Whisper's name for the most tokens of an answer.
    places = min(places, getattr(model.config, "max_target_positions", places))
    batches = tuple(sorted({1, context.batch_size}))
    if not getattr(model.config, "is_encoder_decoder", False):
        if model_input(model) != IDS:
            raise ModelLoadError(f"{_KEY} names {path!r}, but {type(model).__name__} does not generate from tokens.")
        return GraphSizes(places, sizes_of(model.config, section, places).steps, batches)
    if model_input(model) == IDS:
        return GraphSizes(places, batches=batches, texts=sizes_of(model.config, section, places).texts)
    shapes = {tuple(source.shape[1:]) for call in calls if (source := arguments.source(call)) is not None}
    if len(shapes) != 1:
        seen = " and ".join(map(str, map(list, sorted(shapes)))) or "none"
        raise ModelLoadError(
            f"{_KEY} names {path!r}, whose encoder needs one shape of {model_input(model)}; warmup.samples show {seen}."
        )
    return GraphSizes(places, batches=batches, features=shapes.pop())


def _in_precision(config: ServingConfig) -> ServingConfig:
    own = config.openvino.model_copy(update={"precision": config.openvino.generate.computation})
    return config.model_copy(update={"openvino": own})


def _facts(generation: CompiledGeneration) -> dict[str, Any]:
    sizes = generation.sizes
    return {
        "engine": "compile", "max_length": sizes.places, "steps": [1, *sizes.steps], "batches": list(sizes.batches),
        "encoder_lengths": list(sizes.texts), "cache_bytes": generation.bytes_of_a_sequence(),
    }  # fmt: skip
