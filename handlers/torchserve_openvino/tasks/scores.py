"""Turns a classifier's logits into scores, as transformers' pipelines do."""

from typing import Any

import torch

from torchserve_openvino.errors import NonFiniteOutputError
from torchserve_openvino.serving.verification.measures import Independent, Measure, Top1


def probabilities(logits: torch.Tensor) -> list[float]:
    """Returns the softmax of logits over the last dimension, in float32.

    Raises:
        NonFiniteOutputError: A logit is NaN, so that there is no order of labels.
    """
    if bool(logits.isnan().any()):
        raise NonFiniteOutputError("the model's scores are not numbers for this input")
    return torch.softmax(logits.float(), dim=-1).tolist()


def class_scores(config: Any, logits: torch.Tensor) -> list[float]:
    """Returns the scores of all labels: softmax, sigmoid for independent labels, the logits of a regression.

    Args:
        config: The model's configuration.
        logits: ``[labels]``.

    Raises:
        NonFiniteOutputError: A logit is NaN, so that there is no order of labels.
    """
    if config.problem_type == "regression":
        if bool(logits.isnan().any()):
            raise NonFiniteOutputError("the model's result is not a number for this input")
        return logits.float().tolist()
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return torch.sigmoid(logits.float()).tolist()
    return probabilities(logits)


def measure_of(config: Any) -> Measure | None:
    """Returns how scores in a narrower precision are judged; None for a regression.

    Args:
        config: The model's configuration.
    """
    if config.problem_type == "regression":
        return None
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return Independent()
    return Top1()
