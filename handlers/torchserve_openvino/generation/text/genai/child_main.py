"""The process that generates: reads how to begin, loads the pipeline, and steps it until its worker is gone."""

import contextlib
import json
import logging
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from torchserve_openvino.errors import TorchServeOpenVINOError
from torchserve_openvino.generation.text.genai.pipeline import Pipeline, PipelineSettings
from torchserve_openvino.generation.text.genai.stepping import serve


def main(descriptor: int) -> None:
    """Runs until the other end of a socket closes.

    Args:
        descriptor: The socket.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    # Ctrl-C in a terminal reaches all of its processes: this one ends with its worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(descriptor) as connection:
        # While the worker looks for the model; `Pipeline` says what is wrong with the import.
        with contextlib.suppress(ImportError):
            import openvino_genai  # noqa: F401
        try:
            settings = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            # There is no model to load.
            return
        try:
            pipeline = Pipeline(Path(settings["folder"]), PipelineSettings(**settings["settings"]))
        except TorchServeOpenVINOError as error:
            connection.send_bytes(json.dumps({"error": str(error)}).encode())
            return
        connection.send_bytes(json.dumps({"error": None}).encode())
        serve(pipeline, frozenset(settings["eos"]), connection)


if __name__ == "__main__":
    main(int(sys.argv[1]))
