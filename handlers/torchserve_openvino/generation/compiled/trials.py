"""Compares the compiled `generate` of a model with its own: always the most probable token, and its logits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.generation.compiled.compiled_generation import CompiledGeneration
from torchserve_openvino.generation.compiled.layout import IDS, model_input
from torchserve_openvino.generation.text.expected import made_up, nearness_of
from torchserve_openvino.generation.text.generation_proof import TIE, Count, Difference, GenerationProof, problems_of

# The most probable token of each step, whatever the call or the model's settings ask.
_GREEDY = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
_DETAILS = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
_DROPPED = ("streamer", "generation_config", "max_length", "min_length", "num_beam_groups", "length_penalty")


class Trials:
    """Runs a model's `generate` twice, in eager PyTorch and compiled, with the same arguments.

    Args:
        model: The model.
        function: Its `generate`, as a function of the model.
        compiled: The compiled one.
        generation: The graphs.
        tokens: How many tokens to compare of each answer.
    """

    def __init__(
        self, model: nn.Module, function: Callable[..., Any], compiled: Callable[..., Any],
        generation: CompiledGeneration, tokens: int,
    ) -> None:  # fmt: skip
        self._model, self._function, self._compiled = model, function, compiled
        self._generation = generation
        self._tokens = min(tokens, generation.sizes.places - 1)

    def run(self, seen: Sequence[Mapping[str, Any]], form: str, verify: VerifySection) -> GenerationProof:
        """Compares answers to what samples showed, and to made-up prompts.

        Args:
            seen: Arguments of `generate`, by name.
            form: Precision of computation.
            verify: `handler.openvino.verify`: the tolerances.
        """
        count, pairs, rows = Count(), [], 0
        for arguments in (*map(self._greedy, seen), *self._made_up()):
            with torch.no_grad():
                expected = self._function(self._model, **arguments)
                generated = self._compiled(**arguments)
            for row in range(len(expected.sequences)):
                pairs += _compared(rows, row, expected, generated, count, exact=form == "f32")
                rows += 1
        near = nearness_of(pairs)
        return GenerationProof(
            rows, count.compared, count.equal, count.ties, count.first, count.drift, near,
            tuple(problems_of(form, count, near, verify)),
        )  # fmt: skip

    def _greedy(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        remaining = {name: value for name, value in arguments.items() if name not in _DROPPED}
        prompt = (
            arguments.get("decoder_input_ids")
            if self._generation.layout.encodes
            else arguments.get("inputs", arguments.get(IDS))
        )
        room = self._generation.sizes.places - (int(prompt.shape[1]) if isinstance(prompt, Tensor) else 1)
        return {**remaining, **_GREEDY, **_DETAILS, "max_new_tokens": max(1, min(self._tokens, room))}

    def _made_up(self) -> list[dict[str, Any]]:
        """Returns prompts of several lengths, and some of them together, padded on the left."""
        sizes, layout = self._generation.sizes, self._generation.layout
        if model_input(self._model) != IDS:
            return []
        longest = max(sizes.texts) if layout.encodes else sizes.places - self._tokens
        prompts = [torch.tensor([prompt]) for prompt in made_up(layout.vocabulary, self._special(), longest)]
        batches = [(ids, torch.ones_like(ids)) for ids in prompts]
        if len(prompts) > 1:
            least, most = prompts[0], prompts[1]
            padding = torch.zeros(1, most.shape[1] - least.shape[1], dtype=torch.int64)
            mask = torch.cat([torch.cat([padding, torch.ones_like(least)], 1), torch.ones_like(most)])
            batches.append((torch.cat([torch.cat([padding, least], 1), most]), mask))
        return [self._greedy({IDS: ids, "attention_mask": mask, "pad_token_id": 0}) for ids, mask in batches]

    def _special(self) -> frozenset[int]:
        config: Any = self._model.generation_config
        tokens: list[int] = []
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(config, name, None)
            tokens += value if isinstance(value, list) else [value] if value is not None else []
        return frozenset(tokens)


def _compared(
    number: int, row: int, reference: Any, generated: Any, count: Count, *, exact: bool
) -> list[tuple[Any, Any]]:  # fmt: skip
    """Compares one row token by token, up to the first that differs; returns the logits up to there."""
    ours, theirs, logits = [], [], list(zip(generated.logits, reference.logits, strict=False))
    start = reference.sequences.shape[1] - len(reference.logits)
    for index, (mine, their) in enumerate(logits):
        ours.append(mine[row].float())
        theirs.append(their[row].float())
        token, expected = int(generated.sequences[row, start + index]), int(reference.sequences[row, start + index])
        count.compared += 1
        if token == expected:
            count.equal += 1
            both = [logits[row].float().log_softmax(-1)[token] for logits in (mine, their)]
            drift = abs(float(both[0] - both[1]))
            # A row that ended before others goes on with padding.
            if not drift <= count.drift:
                count.drift = drift
            continue
        scores = reference.scores[index][row].float().log_softmax(-1)
        gap = float(scores[expected] - scores[token])
        if exact and gap <= TIE:
            count.ties += 1
        else:
            count.first = count.first or Difference(number, start, index, expected, token, gap)
        break
    return [(torch.stack(ours).numpy(), torch.stack(theirs).numpy())] if ours else []
