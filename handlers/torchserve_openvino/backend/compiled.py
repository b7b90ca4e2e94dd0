"""A compiled model as its user calls it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torchserve_openvino.backend.capture.stand_in import StandIn
from torchserve_openvino.backend.runners.guarded import Runner


class CompiledModule(StandIn):
    """A compiled model: call it as the model itself; other attributes are the model's.

    Args:
        runner: Runs its calls.
        remake: Compiles another model as this one was, for a copy.

    Attributes:
        report: What ran where, and why; live.
        eager: The model that was compiled, unchanged.
    """

    def __init__(self, runner: Runner, remake: Callable[[Any], "CompiledModule"] | None = None) -> None:
        # Written around `__setattr__`, which writes to the model.
        vars(self).update(eager=runner.model, report=runner.report)
        self._remake = remake
        self._become(runner)
        runner.settles(self._become)

    def _become(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; compiles at the first call, and for each new shape, dtype or code path.

        Inside another model that is being captured the module itself is called, and becomes part of that graph.
        """
        return self._runner(args, kwargs)

    def _inside(self, *args: Any, **kwargs: Any) -> Any:
        """A call inside another model that is being captured."""
        return self._runner.inside(args, kwargs)

    # By this name Dynamo finds what it shall trace instead (tests/contract/test_dynamo.py).
    __call__._torchdynamo_inline = _inside  # type: ignore[attr-defined]

    def freeze(self) -> "CompiledModule":
        """Promises that the model will not change any more, and takes the guards out of the calls to come.

        After it, a change of weights, buffers, mode, attributes or globals of the model is not seen: answers stay
        those of the frozen state. Inputs are checked as before: a new shape or type is compiled. Calls that can't be
        repeated without Dynamo (a graph break, an output that is a view, a buffer that changes) stay guarded.
        """
        self._runner.freeze()
        return self

    @property
    def frozen(self) -> int:
        """How many input signatures run without guards; 0 before `freeze`."""
        return self._runner.frozen

    @property
    def guarded_reasons(self) -> dict[str, int]:
        """Why calls stay guarded after `freeze`: reasons with the number of signatures."""
        return self._runner.guarded_reasons

    def poisoned(self) -> AbstractContextManager[None]:
        """While it lasts, answers are written to memory full of NaN, so that unwritten memory shows in a comparison."""
        return self._runner.poisoned()

    def reject_cached(self) -> bool:
        """Throws away the entries of the cache that calls of this model use, because an answer is wrong.

        Returns:
            Whether there were any; compile the model again then.
        """
        return self._runner.reject_cached()

    def confirm_cached(self) -> None:
        """Says that somebody compared the answers of all calls so far with eager PyTorch's."""
        self._runner.confirm_cached()

    def release_weights(self) -> "CompiledModule":
        """Frees the module's parameters and buffers, which the frozen calls do not need.

        After it the module is empty, only the signatures recorded since `freeze` can be called, and nothing can fall
        back to eager PyTorch. Only a model compiled with `CompileSpec.own_weights` can do so.

        Raises:
            WeightsReleasedError: Something still needs them: the reason is in the message, and nothing was freed.
        """
        self._runner.release_weights()
        return self

    @property
    def released(self) -> bool:
        """Whether `release_weights` freed the module's weights."""
        return self._runner.released

    def give_memory_back(self) -> int:
        """Gives back memory that holds the cache's files; call it once each shape has run, and weights are packed.

        Returns:
            Bytes.
        """
        return self._runner.give_memory_back()

    def drop(self) -> None:
        """Frees what was compiled, and forgets calls that it stored: another way to compile the model was preferred."""
        self._runner.drop()

    @property
    def _freezes_copies(self) -> bool:
        return self._runner.freezes

    def __repr__(self) -> str:
        return f"CompiledModule({self.eager!r})"
