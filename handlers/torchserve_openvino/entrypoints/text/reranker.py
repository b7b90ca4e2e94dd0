"""Orders texts by a query: query and texts in, scores out."""

from torchserve_openvino.tasks.text.reranker import Reranker


class OpenVINOReranker(Reranker):
    """The handler class that TorchServe loads."""
