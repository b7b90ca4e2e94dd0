"""Finds settings that are valid but make no sense on this machine, or together."""

from collections.abc import Iterator
from pathlib import Path

from torchserve_openvino.cache.storage.directory import open_root
from torchserve_openvino.cache.storage.remote import is_remote
from torchserve_openvino.config import ServingConfig
from torchserve_openvino.errors import CacheDirectoryError

# What TorchServe takes where the YAML names none.
_BATCH_SIZE, _WORKERS, _QUEUE = 1, 1, 100


def implausible(config: ServingConfig) -> Iterator[str]:
    """Yields a sentence for each setting that a worker takes, but that was probably not meant.

    Args:
        config: The settings.
    """
    # Imported here: it imports torch.
    from torchserve_openvino.serving.threads import usable_cores

    keys, section, cores = config.torchserve, config.openvino, usable_cores()
    batch = int(keys.get("batchSize", _BATCH_SIZE))
    workers = int(keys.get("maxWorkers", keys.get("minWorkers", _WORKERS)))
    queue = int(keys.get("jobQueueSize", _QUEUE))
    if isinstance(section.threads, int) and section.threads * workers > cores:
        times = f" for each of {workers} workers" if workers > 1 else ""
        yield (
            f"handler.openvino.threads is {section.threads}{times}, but this machine lets a process use {cores} "
            "core(s): they would wait for each other; set auto"
        )
    options = config.backend.options.config if config.backend is not None else {}
    for name in ("INFERENCE_NUM_THREADS", "NUM_STREAMS"):
        value = str(options.get(name, ""))
        if value.isdecimal() and int(value) > cores:
            yield f"{name} is {value}, but this machine lets a process use {cores} core(s)"
    for key, sizes in (
        ("warmup.batch_sizes", section.warmup.batch_sizes),
        ("batching.buckets", section.batching.buckets),
    ):
        if sizes == "auto":
            continue
        if min(sizes) > 1 and batch == 1:
            yield (
                f"handler.openvino.{key} is {sizes}, but batchSize is 1: each request with one item is padded to "
                f"{min(sizes)}; raise batchSize, or add 1"
            )
        elif max(sizes) > batch:
            yield (
                f"handler.openvino.{key} has {max(sizes)}, but batchSize is {batch}: only a request with several items "
                "fills such a batch, and it takes time and memory at start; raise batchSize, or remove it"
            )
    if queue < batch * workers:
        yield (
            f"jobQueueSize is {queue}, less than the {batch * workers} requests that {workers} worker(s) with "
            f"batchSize {batch} take at once: batches stay small, and requests get 503"
        )


def refused_cache(config: ServingConfig) -> str | None:
    """Returns why a worker would refuse the cache folder; None if it would not, or if there is none yet."""
    options = config.backend.options if config.backend is not None else None
    if options is None or not options.model_caching or not options.cache_dir or is_remote(options.cache_dir):
        return None
    try:
        open_root(Path(options.cache_dir), writable=False)
    except CacheDirectoryError as error:
        return f"pt2.compile.options.cache_dir: {error}"
    return None
