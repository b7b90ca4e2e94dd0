"""Pins what the engine relies on in OpenVINO GenAI 2026.4 and in transformers' cache."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

genai = pytest.importorskip("openvino_genai")
transformers = pytest.importorskip("transformers")


def test_the_tested_version() -> None:
    assert genai.__version__.startswith("2026.4."), "read in GenAI 2026.4"


def test_names_of_the_pipeline() -> None:
    names = {"add_request", "step", "has_non_finished_requests", "get_metrics"}
    assert names <= set(dir(genai.ContinuousBatchingPipeline))
    scheduler = genai.SchedulerConfig()
    assert {"num_kv_blocks", "cache_size", "max_num_batched_tokens", "dynamic_split_fuse"} <= set(dir(scheduler))
    config = genai.GenerationConfig()
    for name in ("ignore_eos", "eos_token_id", "stop_token_ids", "logprobs", "rng_seed", "repetition_penalty"):
        assert hasattr(config, name)


def test_finish_reasons_and_statuses() -> None:
    assert {"NONE", "STOP", "LENGTH"} <= set(dir(genai.GenerationFinishReason))
    assert {"RUNNING", "FINISHED", "IGNORED", "CANCEL"} <= set(dir(genai.GenerationStatus))


def test_a_cache_layer_can_be_made_of_given_tensors() -> None:
    """What `exporting/exported_language_model.py` does while torch.export traces."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    keys, values = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    cache = DynamicCache()
    cache.layers.append(layer)
    assert cache.get_seq_length() == 3
    got, _ = cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    assert got.shape == (1, 2, 4, 4) and "layer_idx" in inspect.signature(cache.update).parameters


def saved_export(folder: Path, **changes: Any) -> Path:
    import openvino as ov

    from language_models import tiny
    from torchserve_openvino.generation.text.exporting.exported_language_model import export

    ov.save_model(export(tiny("llama", **changes)).model, folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_export(tmp_path_factory.mktemp("llama"))


def pipeline(folder: Path, pages: int, lookup: bool = False, **given: Any) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.num_kv_blocks = 0, pages
    for name, value in given.items():
        setattr(scheduler, name, value)
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return genai.ContinuousBatchingPipeline(
        str(folder), scheduler, "CPU", {**properties, "prompt_lookup": True} if lookup else properties
    )


def config(count: int, guesses: int = 0) -> Any:
    found = genai.GenerationConfig()
    found.max_new_tokens, found.ignore_eos = count, True
    found.eos_token_id, found.stop_token_ids = 2, {2}
    if guesses:
        found.num_assistant_tokens, found.max_ngram_size = guesses, 3
    return found


def run(pipe: Any, *handles: Any) -> list[list[int]]:
    got: list[list[int]] = [[] for _ in handles]
    while pipe.has_non_finished_requests():
        pipe.step()
        for tokens, handle in zip(got, handles, strict=True):
            while handle.can_read():
                for output in handle.read().values():
                    tokens.extend(output.generated_ids)
    return got


def ids(count: int) -> Any:
    import numpy as np

    return ov_tensor(np.full((1, count), 5, dtype=np.int64))


def ov_tensor(array: Any) -> Any:
    import openvino as ov

    return ov.Tensor(array)


@pytest.mark.slow
def test_no_tokenizer_is_needed_and_a_page_has_32_tokens(exported: Path) -> None:
    """Why `genai/pipeline.py` gives no tokenizer, and admits prompts by pages of 32 tokens."""
    pipe = pipeline(exported, pages=2)
    (tokens,) = run(pipe, pipe.add_request(0, ids(60), config(4)))
    assert len(tokens) == 4
    # One token more needs a third page: the sequence is dropped, with no error.
    handle = pipe.add_request(1, ids(60), config(8))
    (tokens,) = run(pipe, handle)
    assert len(tokens) < 8 and handle.get_status() == genai.GenerationStatus.IGNORED


@pytest.mark.slow
def test_a_stop_token_is_demanded(exported: Path) -> None:
    """Why a model without an end-of-text token gets one that it does not have."""
    found = config(4)
    found.eos_token_id, found.stop_token_ids = -1, set()
    with pytest.raises(RuntimeError, match="must be non-negative"):
        pipeline(exported, pages=2).add_request(0, ids(3), found)


@pytest.mark.slow
def test_sequences_that_need_more_pages_than_there_are_may_be_dropped_or_delayed(exported: Path) -> None:
    """Why a prompt is admitted only when its longest answer has room."""
    pipe = pipeline(exported, pages=4)
    handles = [pipe.add_request(number, ids(30), config(60)) for number in range(3)]
    run(pipe, *handles)
    assert {handle.get_status() for handle in handles} <= {
        genai.GenerationStatus.FINISHED, genai.GenerationStatus.IGNORED,
    }  # fmt: skip


@pytest.mark.slow
def test_a_cancelled_sequence_is_gone_after_one_step(exported: Path) -> None:
    pipe = pipeline(exported, pages=8)
    handle = pipe.add_request(0, ids(20), config(100))
    pipe.step()
    handle.cancel()
    pipe.step()
    assert not pipe.has_non_finished_requests()
    pipe.step()


@pytest.mark.slow
def test_a_page_that_was_half_computed_is_found_as_if_it_were_whole(exported: Path) -> None:
    """Why a prompt is not dropped while it is computed (`genai/stepping.py`); a version without this needs no care."""
    import numpy as np
    import openvino as ov

    def tokens(count: int) -> Any:
        return ov.Tensor(random.integers(3, 90, (1, count)))

    def settled(pipe: Any, prompt: Any) -> list[int]:
        return run(pipe, pipe.add_request(100, prompt, config(8)))[0]

    random, wrong = np.random.default_rng(0), 0
    given: dict[str, Any] = {"max_num_batched_tokens": 64, "dynamic_split_fuse": True}
    for _ in range(6):
        pipe = pipeline(exported, 64, enable_prefix_caching=True, **given)
        others = [pipe.add_request(number, tokens(5), config(40)) for number in range(3)]
        pipe.step()
        prompt = tokens(300)
        dropped = pipe.add_request(9, prompt, config(8))
        for _ in range(3):
            # 61 tokens, as the others take three.
            pipe.step()
        dropped.cancel()
        run(pipe, *others)
        wrong += settled(pipe, prompt) != settled(pipeline(exported, 64, **given), prompt)
    assert wrong > 0


def drawn(random: Any, count: int, tokens: int) -> Any:
    return ov_tensor(random.integers(3, 3 + tokens, (1, count)))


@pytest.mark.slow
def test_two_prompts_that_go_on_from_a_page_write_into_it(exported: Path) -> None:
    """Why some prompts wait for each other (`genai/beginnings.py`)."""
    import numpy as np

    random, wrong = np.random.default_rng(0), 0
    for _ in range(6):
        whole = random.integers(3, 90, (1, 54))
        pipe, plain = pipeline(exported, 64, enable_prefix_caching=True), pipeline(exported, 64)
        # Its second page holds 22 tokens.
        run(pipe, pipe.add_request(0, ov_tensor(whole), config(1)))
        prompts = [ov_tensor(np.concatenate([whole, random.integers(3, 90, (1, n))], axis=1)) for n in (4, 13)]
        found = run(pipe, *(pipe.add_request(n, each, config(8)) for n, each in enumerate(prompts, 1)))
        wrong += found != run(plain, *(plain.add_request(n, each, config(8)) for n, each in enumerate(prompts)))
    assert wrong > 0


def test_what_is_read_at_once_is_of_one_step(exported: Path) -> None:
    """How `genai/pipeline.py` counts the guesses that were right."""
    pipe, reads = pipeline(exported, pages=8, lookup=True), []
    handle = pipe.add_request(0, ids(20), config(100, guesses=4))
    while pipe.has_non_finished_requests():
        pipe.step()
        while handle.can_read():
            reads.append([output.generated_ids for output in handle.read().values()])
            assert not handle.can_read()
    sizes = [len(tokens) for (tokens,) in reads]
    assert sum(sizes) == 100 and 1 < max(sizes) <= 5


@pytest.mark.slow
def test_a_guess_is_given_out_unchecked_if_a_step_computes_only_some(exported: Path) -> None:
    """Why `genai/prompts.py` limits how many sequences run at once."""
    import numpy as np

    random, wrong = np.random.default_rng(0), 0
    given: dict[str, Any] = {"max_num_batched_tokens": 16, "dynamic_split_fuse": True}
    for _ in range(20):
        prompts = [drawn(random, 40, 2) for _ in range(6)]
        guessing, plain = pipeline(exported, 64, lookup=True, **given), pipeline(exported, 64, **given)
        found = run(guessing, *(guessing.add_request(i, each, config(30, 5)) for i, each in enumerate(prompts)))
        wanted = run(plain, *(plain.add_request(i, each, config(30)) for i, each in enumerate(prompts)))
        wrong += found != wanted
    assert wrong > 0


@pytest.mark.slow
def test_a_step_holds_the_interpreter(tmp_path: Path) -> None:
    """Why other threads of a worker run between two steps only; a version that changes this is faster."""
    import threading
    import time

    pipe = pipeline(saved_export(tmp_path, hidden_size=256, num_hidden_layers=4), pages=64, max_num_batched_tokens=2048)
    # A handle that nobody keeps ends its sequence.
    handle = pipe.add_request(0, ids(400), config(1))
    gaps: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    pipe.step()
    took = time.perf_counter() - started
    stop.set()
    thread.join()
    assert handle.get_status() == genai.GenerationStatus.FINISHED
    assert max(gaps) > took / 2


@pytest.mark.slow
def test_a_cache_of_another_precision_than_the_computation_is_refused(exported: Path) -> None:
    """Why `generate.kv_cache` follows `generate.weights`."""
    with pytest.raises(RuntimeError, match="expect kvcache type"):
        genai.ContinuousBatchingPipeline(
            str(exported), genai.SchedulerConfig(), "CPU",
            {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "bf16"},
        )  # fmt: skip


@pytest.mark.slow
def test_attention_is_paged_without_mask_and_state(exported: Path) -> None:
    """What `exporting/exported_language_model.py` tries on a copy."""
    import openvino as ov
    from openvino._offline_transformations import paged_attention_transformation

    model = ov.Core().read_model(exported / "openvino_model.xml")
    before = [operation.get_type_name() for operation in model.get_ops()]
    assert before.count("ReadValue") == 4 and "PagedAttentionExtension" not in before
    paged_attention_transformation(model)
    after = [operation.get_type_name() for operation in model.get_ops()]
    assert after.count("PagedAttentionExtension") == 2 and "ReadValue" not in after
    names = {name for port in model.inputs for name in port.get_names()}
    assert "attention_mask" not in names and "beam_idx" not in names
