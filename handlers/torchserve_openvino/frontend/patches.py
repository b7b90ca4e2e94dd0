"""What is wrong with TorchServe 0.12's workers, and the few instructions that mend it.

- A worker that waits for a batch to fill holds the requests that it has. If its backend ends meanwhile, they are
  forgotten, and never answered. Now they go back to the head of the queue, for the next worker that is ready; those of
  an asynchronous worker are answered with 500, as are the ones in its backend.

The others concern asynchronous workers only:

- `AsyncBatchAggregator` keeps the requests that are in the backend in a `LinkedHashMap`, which two threads change at
  the same time: one puts new requests in, one takes answered ones out. Sometimes a request gets lost. Its answer is
  "unexpected" then, which closes the connection to the worker. A `ConcurrentHashMap` may be changed by both.
- Requests that are in a backend that ends are never answered. Now they are answered with 500.
- A worker that was started again takes requests before it has loaded the model, and is ended for that; one that can't
  be loaded waits for a request, which it loses. Both come from a flag that is set once for all lives of a worker, and
  from an interrupt that is logged and forgotten.

The classes are known by their digests, so that no other version of them is touched.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping

from torchserve_openvino.frontend.class_file import ClassFile, Code

_PACKAGE = "org/pytorch/serve/wlm"
_BATCHES = f"{_PACKAGE}/BatchAggregator"
_AGGREGATOR, _WORKER = f"{_PACKAGE}/AsyncBatchAggregator", f"{_PACKAGE}/AsyncWorkerThread"
_JOB = "org/pytorch/serve/job/Job"
_POLL_BATCH = f"(Ljava/lang/String;L{_PACKAGE}/WorkerState;)V"
_SEND_ERROR = "(Lorg/pytorch/serve/util/messages/BaseModelRequest;Ljava/lang/String;I)V"
_WHY = "Worker died."

_ALOAD_0, _ALOAD_1, _ALOAD_3, _ACONST_NULL, _ICONST_0 = b"\x2a", b"\x2b", b"\x2d", b"\x01", b"\x03"
_NOP, _RETURN, _ATHROW, _LDC_W, _GETFIELD, _PUTFIELD = b"\x00", b"\xb1", b"\xbf", b"\x13", b"\xb4", b"\xb5"
_INVOKE_VIRTUAL, _INVOKE_SPECIAL, _INVOKE_INTERFACE = b"\xb6", b"\xb7", b"\xb9"
_STATUS = b"\x11" + struct.pack(">h", 500)


def _batches(data: bytes) -> bytes:
    class_file = ClassFile(data)
    # catch (Throwable error) { this.sendError(null, why, 500); throw error; }, which puts requests into the queue, and
    # answers commands.
    every = class_file.method(_BATCHES, "sendError", _SEND_ERROR)
    handler = _ALOAD_0 + _ACONST_NULL + _LDC_W + class_file.string(_WHY) + _STATUS + _INVOKE_VIRTUAL + every + _ATHROW
    poll = class_file.code("pollBatch", _POLL_BATCH)
    poll.catch_all(0, len(poll.body), handler, class_file.type("java/lang/Throwable"), last_frame=19)
    class_file.set_code("pollBatch", _POLL_BATCH, poll)
    return class_file.to_bytes()


def _aggregator(data: bytes) -> bytes:
    class_file = ClassFile(data)
    class_file.rename("java/util/LinkedHashMap", "java/util/concurrent/ConcurrentHashMap")
    why = class_file.string(_WHY)
    # handleErrorJob(job): job.sendError(500, why), instead of giving it to another worker: who reads a stream has its
    # beginning already.
    answer = class_file.method(_JOB, "sendError", "(ILjava/lang/String;)V")
    body = _ALOAD_1 + _STATUS + _LDC_W + why + _INVOKE_VIRTUAL + answer + _RETURN
    class_file.set_code("handleErrorJob", f"(L{_JOB};)V", Code(3, 2, body))
    # cleanJobs(), which ends the run of a worker: this.sendError(null, why, 500); super.cleanJobs()
    every = class_file.method(_AGGREGATOR, "sendError", _SEND_ERROR)
    clean = class_file.method(_BATCHES, "cleanJobs", "()V")
    body = _ALOAD_0 + _ACONST_NULL + _LDC_W + why + _STATUS + _INVOKE_VIRTUAL + every
    class_file.set_code("cleanJobs", "()V", Code(4, 1, body + _ALOAD_0 + _INVOKE_SPECIAL + clean + _RETURN))
    # pollBatch has its batch in a variable while it fills. catch (Throwable error) { jobs_in_backend.putAll(batch);
    # throw error; }: cleanJobs, which comes next, answers these too.
    jobs_field = class_file.field(_AGGREGATOR, "jobs_in_backend", "Ljava/util/Map;")
    put = class_file.interface_method("java/util/Map", "putAll", "(Ljava/util/Map;)V")
    handler = _ALOAD_0 + _GETFIELD + jobs_field + _ALOAD_3 + _INVOKE_INTERFACE + put + b"\x02\x00" + _ATHROW
    poll = class_file.code("pollBatch", _POLL_BATCH)
    # From where the variable is set to where Model.pollBatch has returned.
    poll.catch_all(8, 31, handler, class_file.type("java/lang/Throwable"), last_frame=102)
    class_file.set_code("pollBatch", _POLL_BATCH, poll)
    return class_file.to_bytes()


def _worker(data: bytes) -> bytes:
    class_file = ClassFile(data)
    run = class_file.code("run", "()V")
    interrupted = class_file.type("java/lang/InterruptedException")
    # The first of the two that catch an interrupt only logs it; the second ends the run, and starts the worker again.
    forgets = next(handler for handler in run.caught if handler.type == interrupted)
    run.caught.remove(forgets)
    flag = class_file.field(_WORKER, "loadingFinished", "Z")
    run.prepend(_ALOAD_0 + _ICONST_0 + _PUTFIELD + flag + 3 * _NOP)
    class_file.set_code("run", "()V", run)
    return class_file.to_bytes()


# What makes the patched class, and the digest of the one that it is made of.
_PATCHED: Mapping[str, tuple[Callable[[bytes], bytes], str]] = {
    f"{_BATCHES}.class": (_batches, "a2518f61d90c11c73d18fab1da637bc03ab32a050e52be4bbd236e263c30c973"),
    f"{_AGGREGATOR}.class": (_aggregator, "aed0a24091f876e16c3138c335df25fca0380fb704212bc3b53f004c78111cf4"),
    f"{_WORKER}.class": (_worker, "c64c9e4e6c0edab0890c34d86e5250703f8a6fc2cd53d99a6e2f845a1ac1e4e5"),
}
CLASSES = tuple(_PATCHED)


def is_faulty(name: str, data: bytes) -> bool:
    """Whether a class is the one of TorchServe 0.12.

    Args:
        name: One of `CLASSES`.
        data: Its class file.
    """
    return hashlib.sha256(data).hexdigest() == _PATCHED[name][1]


def patched(name: str, data: bytes) -> bytes:
    """Returns the class file of a patched class.

    Args:
        name: One of `CLASSES`.
        data: Its class file in TorchServe 0.12.
    """
    return _PATCHED[name][0](data)
