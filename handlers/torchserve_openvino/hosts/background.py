"""Tasks that run beside others in an event loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def background(run: Coroutine[Any, Any, Any], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[Any]:
    """Runs a coroutine as a task of the running loop, which itself keeps only weak references.

    Args:
        run: The coroutine.
        tasks: Keeps the task while it runs.
    """
    task = asyncio.get_running_loop().create_task(run)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
