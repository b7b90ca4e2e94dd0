"""Answers questions from a text: question and context in, a span with its score out."""

from torchserve_openvino.tasks.text.question_answerer import QuestionAnswerer


class OpenVINOQuestionAnswerer(QuestionAnswerer):
    """The handler class that TorchServe loads."""
