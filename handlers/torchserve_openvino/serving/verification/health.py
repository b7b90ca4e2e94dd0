"""`Health`: whether a worker still answers its own warm-up sample as it did when it was verified."""

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import torch

from torchserve_openvino.backend.capture.kept_state import StateKeeper
from torchserve_openvino.backend.runtime.compare import comparable, copied
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.errors import class_and_line
from torchserve_openvino.report import CompileReport
from torchserve_openvino.serving.models import Models
from torchserve_openvino.serving.policy import PolicyWatch
from torchserve_openvino.serving.requests.messages import JSON, Request, Response
from torchserve_openvino.serving.verification.judge import Judge

# Bytes of a sample's inputs and outputs that are kept; a larger sample is not run again.
_MOST_BYTES = 64 << 20

Answer = Callable[[Sequence[Request]], list[Response]]


class Health:
    """Runs the first warm-up sample again, and compares.

    The reference is the compiled model's own answer after it was compared with eager PyTorch, whose weights may be
    freed by now. A model that answers the same sample in another way each time, or keeps state between calls, has no
    such reference, and is not run.

    Args:
        report: What ran where, and whether it was verified.
        models: The compiled models; None in eager PyTorch.
        eager: The model, which holds the state of the compiled one.
        section: Tolerances.
        watch: Checks calls against the fallback policy.

    Attributes:
        checks: What else has to hold: each returns what is wrong, or an empty text.
    """

    def __init__(
        self,
        report: CompileReport,
        models: Models | None,
        eager: Any,
        section: VerifySection,
        watch: PolicyWatch,
    ) -> None:
        self._report, self._section, self._watch = report, section, watch
        prepared = models.root if models is not None else None
        self._model = prepared.model if prepared is not None else None
        # A call of another shape would have to be padded, and counted as a request's.
        cases = [case for case in prepared.cases if case.compiled_shape] if prepared is not None else []
        self._case = cases[0] if cases else None
        self.checks: list[Callable[[], str]] = []
        self._expected: list[torch.Tensor] | None = None
        if self._case is not None:
            keeper = StateKeeper(eager, contents=True)
            tensors = [tensor.clone() for tensor in self._run()]
            size = sum(tensor.nbytes for tensor in tensors)
            if size <= _MOST_BYTES and not self._problem_of(tensors, self._run()) and not keeper.changed():
                self._expected = tensors
            else:
                self._case = None
            keeper.restore()

    def _run(self) -> list[torch.Tensor]:
        assert self._model is not None and self._case is not None
        # The model may write to them.
        args, kwargs = copied(self._case.inputs)
        # The shape is compiled: nothing is built, and no count of requests changes.
        with self._case.modes.on():
            return [tensor.detach() for tensor in comparable(self._model.compiled(*args, **kwargs))]

    def check(self) -> dict[str, Any]:
        """Returns whether this worker is healthy, with the reason if it is not; JSON-safe."""
        problem = self._problem()
        sample = self._case.name if self._case is not None else None
        facts = {"healthy": problem is None, "sample": sample, "verified": self._report.verified}
        return facts if problem is None else {**facts, "reason": problem}

    def _problem(self) -> str | None:
        if violations := self._watch.standing:
            return f"the policy is violated: {'; '.join(violations)}"
        verification = self._report.tracker.verify.to_dict()
        if verification.get("passed") is False:
            return f"verification failed: {'; '.join(verification.get('problems') or ['no reason was kept'])}"
        if problem := next(filter(None, (check() for check in self.checks)), ""):
            return problem
        if self._expected is None or self._case is None:
            return None
        try:
            answer = self._run()
        except Exception as error:
            # Whatever it is, requests meet it, too.
            return f"its warm-up sample ({self._case.name}) fails: {class_and_line(error)}"
        finally:
            fell_back = self._watch.probed()
        if fell_back:
            return f"its warm-up sample ({self._case.name}) falls back: {fell_back}"
        if problem := self._problem_of(self._expected, answer):
            return f"its warm-up sample ({self._case.name}) is answered wrongly{problem}"
        return None

    def _problem_of(self, expected: Sequence[torch.Tensor], answer: Sequence[torch.Tensor]) -> str:
        precision = self._report.summary.precision or "f32"
        return next(iter(Judge(precision, self._section).judge(answer, expected).problems), "")


def with_health(health: Health | None, requests: Sequence[Request], answer: Answer) -> list[Response]:
    """Answers requests for the worker's health, and lets ``answer`` answer the others.

    Args:
        health: The worker's; None before READY.
        requests: The requests of a call.
        answer: Answers requests.
    """
    others = [index for index, request in enumerate(requests) if health is None or not request.asks_health]
    if health is None or len(others) == len(requests):
        return answer(requests)
    responses = [_healthy(health)] * len(requests)
    if others:
        for index, response in zip(others, answer([requests[index] for index in others]), strict=True):
            responses[index] = response
    return responses


def _healthy(health: Health) -> Response:
    state = health.check()
    return Response(state, JSON, HTTPStatus.OK if state["healthy"] else HTTPStatus.SERVICE_UNAVAILABLE)
