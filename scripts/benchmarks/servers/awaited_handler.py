"""A handler that answers as text generation does where TorchServe awaits it, at once: a piece, and an empty end."""

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from ts.handler_utils.utils import send_intermediate_predict_response


class Awaited:
    """Holds each request for up to 4 ms."""

    def __init__(self):
        self._threads = ThreadPoolExecutor(64)
        self._writing = threading.Lock()

    def initialize(self, context):
        """Takes as long as a worker needs to start; TorchServe's frontend expects some time."""
        time.sleep(0.5)

    def handle(self, data, context):
        """Answers the only request of a call."""

        def run():
            time.sleep(random.random() * 0.004)
            with self._writing:
                send_intermediate_predict_response(["ok"], context.request_ids, "", 200, context)
            context.stopping_criteria = {0: lambda _: True}
            return [""]

        async def wait():
            return await asyncio.get_running_loop().run_in_executor(self._threads, run)

        return wait()
