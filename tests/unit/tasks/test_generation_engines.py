"""Text generation on OpenVINO in a worker of this process: its report, its cache, its end."""

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving_worker import Archive, sent
from talker import Frontend
from typer.testing import CliRunner

from chat_models import PROMPTS, eager_tokens, text_of
from torchserve_openvino.cli import app
from torchserve_openvino.errors import ConfigError, ModelLoadError, VerificationError
from torchserve_openvino.generation.text.engine import Sampling
from torchserve_openvino.packaging.precompile import PACKAGED_FOLDER
from torchserve_openvino.serving.loading.archive_manifest import MANIFEST
from torchserve_openvino.tasks.generation.generator import TextGenerator

SMALL = {"max_length": 128, "max_tokens": 64, "proof_tokens": 6}


class Served:
    """A handler for a saved model, in a worker that has a socket."""

    def __init__(self, place: Path, folder: Path, generate: Any = None, options: Any = None, **keys: Any) -> None:
        compile_: dict[str, Any] = {"backend": "openvino", "options": options or {}}
        openvino = {"generate": {**SMALL, **(generate or {})}, **keys.pop("openvino", {})}
        config = {
            "pt2": {"compile": {**compile_, **keys.pop("compile", {})}},
            "handler": {"openvino": openvino},
            **keys,
        }
        self.made = Archive(place, config, None)
        (place / "hub").symlink_to(folder)
        self.handler = TextGenerator()
        self.mine, self.theirs = socket.socketpair()
        self.made.context.cl_socket = self.mine
        self.handler.initialize(self.made.context)

    def __call__(self, body: Any) -> Any:
        return self.made.handle(self.handler, body)[0]

    def close(self) -> None:
        self.handler.engine.close()
        self.mine.close()
        self.theirs.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache that the tests share, since each export takes seconds."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def served(folder: Path, tmp_path: Path, cache: str) -> Iterator[Any]:
    made = []

    def make(options: Any = None, **how: Any) -> Served:
        options = {"model_caching": True, "cache_dir": cache, **(options or {})}
        made.append(Served(tmp_path / f"archive{len(made)}", folder, options=options, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.slow
def test_the_report_says_what_ran_where_and_how_it_was_compared(served: Any, folder: Path) -> None:
    worker = served(generate={"proof_prompts": PROMPTS[:2]})
    report = worker.handler.describe_handle()
    summary, generate = report["summary"], report["generate"]
    assert summary["coverage"] == 1.0 and summary["ops_total"] == generate["operators"] > 50
    assert summary["precision"] == "f32" and summary["partitions"] == 1 and report["fallbacks"] == []
    assert report["verify"]["passed"] and report["verify"]["cases"] == 2
    assert generate["tokens_compared"] == generate["tokens_equal"] == 12 and generate["first_difference"] is None
    assert generate["properties"]["INFERENCE_NUM_THREADS"] == str(report["config"]["threads"]["openvino_threads"])
    assert report["config"]["backend"] == "genai" and report["serving"]["compiles_after_ready"] == 0
    assert generate["now"]["generated_tokens"] == generate["now"]["prompt_tokens"] == 0, "the proof is no traffic"
    assert worker({"prompt": "Hello", "max_tokens": 9})["text"] == text_of(eager_tokens(folder, "Hello", 9))
    # Eager PyTorch's copy of the weights is not there.
    assert not hasattr(worker.handler.eager_model, "parameters")


def test_a_second_worker_neither_traces_nor_compares(served: Any, tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path / "cache")}
    first, second = (served(options=options).handler.describe_handle() for _ in range(2))
    assert (first["cache"]["traces"], second["cache"]["traces"]) == (1, 0)
    assert first["cache"]["stored"] > 0 and second["cache"]["stored"] == 0 and second["cache"]["hits"] > 0
    assert second["generate"]["model_from_cache"] and second["generate"]["proof_from_cache"]
    assert second["verify"]["passed"] and second["summary"]["coverage"] == 1.0


def test_guesses_of_the_prompt_are_counted(served: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        worker = served(generate={"prompt_lookup_tokens": 4})
        prompt = "Hello you " * 8
        answer = worker({"prompt": prompt, "max_tokens": 30})
    assert answer["text"] == text_of(eager_tokens(folder, prompt, 30))
    generate = worker.handler.describe_handle()["generate"]
    assert generate["prompt_lookup_tokens"] == 4 and generate["first_difference"] is None
    assert 0 < generate["now"]["guessed_tokens"] < answer["generated_tokens"]
    assert sent(caplog, "openvino_guessed_tokens_total")


@pytest.mark.slow
def test_openvinos_properties_of_the_yaml_are_used(served: Any) -> None:
    report = served(options={"config": {"INFERENCE_NUM_THREADS": 1}}).handler.describe_handle()
    assert report["generate"]["properties"]["INFERENCE_NUM_THREADS"] == "1"


@pytest.mark.slow
def test_without_a_comparison_the_report_says_so(served: Any) -> None:
    report = served(openvino={"verify": {"against": "off"}}).handler.describe_handle()
    assert report["verify"] == {"skipped": "verify.against is off"} and not report["generate"]["passed"]


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"openvino": {"precision": "bf16"}}, ConfigError, "generate: {weights: bf16}"),
        ({"options": {"precision": "bf16"}}, ConfigError, "generate: {weights: bf16}"),
        ({"options": {"disabled_ops": ["aten.relu.default"]}}, ConfigError, "disabled_ops"),
        ({"compile": {"backend": "inductor"}}, ConfigError, "needs openvino"),
        ({"generate": {"engine": "compile", "weights": "int8"}}, ConfigError, "the engine compile does not do"),
        ({"generate": {"max_length": 4000}}, ModelLoadError, "max_length"),
        ({"generate": {"proof_prompts": ["long " * 100]}}, ConfigError, "proof_prompts"),
    ],
)
def test_what_is_refused(served: Any, how: Any, error: Any, said: str) -> None:
    # TorchServe takes only a RuntimeError for a failed load; the message names our class.
    with pytest.raises((error, ModelLoadError, VerificationError), match=re.escape(said)):
        served(**how)


@pytest.mark.slow
def test_an_engine_that_is_killed_starts_again(served: Any, folder: Path) -> None:
    worker = served()
    wanted = text_of(eager_tokens(folder, "Hello", 6))
    before = worker.handler.describe_handle()["generate"]["process"]
    os.kill(before, signal.SIGSTOP)
    # It is in the middle of this answer.
    asking = threading.Timer(0.5, os.kill, (before, signal.SIGKILL))
    asking.start()
    answer = worker({"prompt": "Hello", "max_tokens": 6})
    assert worker.made.status(0) == 500 and "ended by SIGKILL" in answer["message"]
    refused = worker({"prompt": "Hello", "max_tokens": 6})
    assert worker.made.status(0) == 503 and "starts again" in refused["message"]
    # By itself: no request has to come.
    for _ in range(300):
        if worker.handler._kept.dead is None:
            break
        time.sleep(0.1)
    assert worker({"prompt": "Hello", "max_tokens": 6})["text"] == wanted
    report = worker.handler.describe_handle()
    assert report["verify"]["passed"] and report["generate"]["process"] != before


@pytest.mark.slow
def test_with_asynchronous_communication_it_starts_again_too(served: Any) -> None:
    worker = served(asyncCommunication=True)
    os.kill(worker.handler.describe_handle()["generate"]["process"], signal.SIGKILL)
    ask = [("", b'{"prompt": "Hello", "max_tokens": 6}')]
    for _ in range(300):
        (end,) = Frontend.ends(worker, ask)
        assert int.from_bytes(end[:4], "big") == 200 and b"false" in end
        if worker.handler._kept.dead is None:
            break
        time.sleep(0.1)
    assert worker({"prompt": "Hello", "max_tokens": 6})["text"]


@pytest.mark.slow
def test_an_archive_starts_with_what_was_exported_for_it(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "model-config.yaml"
    config.write_text(json.dumps({"handler": {"openvino": {"generate": SMALL}}}))
    command = ["package", "--hf", str(folder), "--task", "text-generation", "--model-name", "gen", "--precompile"]
    done = CliRunner().invoke(app, [*command, "--config-file", str(config), "--export-path", str(tmp_path)])
    assert done.exit_code == 0, done.output
    checked = CliRunner().invoke(app, ["package", "--check", str(tmp_path / "gen.mar"), "--json"])
    assert json.loads(checked.stdout)["start"] == "from IR", checked.stdout

    from torchserve_openvino.packaging.archive import extract

    place = tmp_path / "unpacked"
    extract(tmp_path / "gen.mar", place)
    assert (place / PACKAGED_FOLDER).is_dir() and (place / MANIFEST).is_file()
    made = Archive(tmp_path / "other", {"handler": {"openvino": {"generate": SMALL}}}, None)
    made.context.system_properties["model_dir"] = str(place)
    handler = TextGenerator()
    handler.initialize(made.context)
    try:
        report = handler.describe_handle()
        assert report["cache"]["traces"] == 0 and report["generate"]["model_from_cache"]
    finally:
        handler.engine.close()


@pytest.mark.slow
def test_what_genai_does_not_do_of_generation_config_is_done_or_said(served: Any, folder: Path, tmp_path: Path) -> None:
    demanding = Path(shutil.copytree(folder, tmp_path / "demanding"))
    path = demanding / "generation_config.json"
    config = json.loads(path.read_text()) | {"no_repeat_ngram_size": 1, "guidance_scale": 2.0}
    path.write_text(json.dumps(config))
    for engine in (None, "genai"):
        made = Served(tmp_path / str(engine), demanding, generate={"engine": engine} if engine else {})
        try:
            report = made.handler.describe_handle()
            said = "no_repeat_ngram_size has no effect with OpenVINO GenAI" in str(report["notes"])
            assert (report["generate"]["engine"], said) == ((engine or "compile"), engine == "genai")
            assert ("no_repeat_ngram_size" in report["generate"]["why"]) == (engine is None)
            assert "guidance_scale has no effect" in str(report["notes"])
            now = report["generate"]["now"]
            assert now["generated_tokens"] == now["prompt_tokens"] == 0, "the proof is no traffic"
            if engine is None:
                pieces = made.handler.engine.submit([5, 6, 7], Sampling(9, ignore_eos=True))
                found = [token.id for piece in pieces for token in piece.tokens]
                assert len({5, 6, 7, *found}) == 3 + 9, "no token comes twice"
        finally:
            made.close()
