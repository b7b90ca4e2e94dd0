"""What text generation relies on in TorchServe's asynchronous service and its intermediate responses."""

import asyncio
import inspect
import socket
from typing import Any

import pytest
from ts import async_service
from ts.context import Context, RequestProcessor
from ts.protocol.otf_message_handler import create_predict_response
from ts.service import Service


def service(entry: Any) -> Any:
    made = Service("net", ".", None, entry, None, 1)
    made._context.metrics = type("Metrics", (), {"request_ids": None, "add_time": lambda *_: None})()
    made.set_cl_socket(None)
    return made


ROW = {"requestId": b"7", "headers": [{"name": b"url_path", "value": b"v1/models"}], "parameters": []}


def test_a_request_is_awaited_with_a_context_of_its_own() -> None:
    contexts = []

    def handle(data: list[Any], context: Context) -> Any:
        contexts.append(context)

        async def answer() -> list[str]:
            return ["x"]

        return answer()

    made = service(handle)
    for _ in range(2):
        asyncio.run(async_service.predict(made, [ROW]))
    first, second = contexts
    assert first is not second and first is not made.context
    assert first.get_request_header(0, "url_path") == "v1/models" and first.request_ids == {0: "7"}


def test_an_exception_becomes_a_message_for_everyone() -> None:
    async def handle(data: list[Any], context: Context) -> list[Any]:
        raise ValueError

    message = asyncio.run(async_service.predict(service(handle), [ROW]))
    # AsyncBatchAggregator.sendResponse sends a message with another status than 200 to all jobs in the backend.
    assert int.from_bytes(message[:4], "big") == 503


def test_final_responses_are_written_by_a_thread_of_their_own() -> None:
    source = inspect.getsource(async_service.AsyncService.send_responses)
    assert "self.service.cl_socket.sendall(" in source


def test_a_socket_can_become_one_of_a_subclass_without_a_layout() -> None:
    class Other(socket.socket):
        __slots__ = ()

    with socket.socket() as made:
        made.__class__ = Other
        assert isinstance(made, Other)


@pytest.mark.parametrize(
    ("intermediate", "criteria", "shown"),
    [(True, None, b"true"), (False, {0: lambda _: True}, b"false"), (False, None, None)],
)
def test_the_header_that_says_whether_more_follows(intermediate: bool, criteria: Any, shown: bytes | None) -> None:
    context = Context("net", ".", None, 1, None, "0")
    context.request_processor = [RequestProcessor({})]
    context.stopping_criteria = criteria
    message = bytes(create_predict_response(["x"], {0: "7"}, "", 200, context, intermediate))
    assert (b"ts_stream_next" in message) is (shown is not None)
    assert shown is None or shown in message


def test_pieces_are_found_by_the_place_of_their_request() -> None:
    context = Context("net", ".", None, 2, None, "0")
    context.request_processor = [RequestProcessor({}), RequestProcessor({})]
    message = bytes(create_predict_response({1: "second"}, {1: "id-1"}, "", 200, context, True))
    assert b"second" in message and b"id-1" in message
