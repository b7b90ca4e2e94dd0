"""`handler.openvino.record`: some requests are kept as files that `tune` and `bench` send again."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from serving_worker import ROWS, WARMUP, close, save_weights

from torchserve_openvino import OpenVINOHandler
from torchserve_openvino.bench.bodies import read_folder
from torchserve_openvino.cache.open import PRECOMPILE_ENV
from torchserve_openvino.config import load_serving_config
from torchserve_openvino.errors import ConfigError, ModelLoadError
from torchserve_openvino.packaging.archive import files_named_by
from torchserve_openvino.tasks.tensor import TensorHandler

SCRUB = """
import json
def scrub(body: bytes, content_type: str) -> bytes | None:
    assert content_type == "application/json"
    rows = json.loads(body)
    if rows[0][0] < 0:
        return None
    if rows[0][1] > 5:
        raise ValueError("no")
    rows[0][3] = 0.0
    return json.dumps(rows).encode()
"""


def started(archive: Any, folder: Path, kind: Any = TensorHandler, **record: Any) -> tuple[Any, Any]:
    section = {"warmup": WARMUP, "record": {"folder": str(folder), "every": 1, **record}}
    made = archive({"handler": {"openvino": section}}, weights=save_weights, batch_size=4)
    handler = kind()
    if "scrub" in record:
        (Path(made.context.system_properties["model_dir"]) / record["scrub"]).write_text(SCRUB)
    handler.initialize(made.context)
    return made, handler


def counts(handler: Any) -> dict[str, Any]:
    handler._openvino.recorder.close()
    return handler.describe_handle()["recorded"]


def test_answered_requests_become_files_that_are_sent_again(archive, tmp_path) -> None:
    made, handler = started(archive, tmp_path / "kept")
    made.handle(handler, ROWS, [[1.0]], {"inputs": ROWS})
    found = counts(handler)
    assert (found["kept"], found["dropped"], found["scrubbed"]) == (2, 0, 0)
    bodies = read_folder(tmp_path / "kept")
    assert {each.content_type for each in bodies} == {"application/json"}
    contents = [json.loads(each.data) for each in bodies]
    assert ROWS in contents and {"inputs": ROWS} in contents
    for each in bodies:
        answer = made.handle(handler, json.loads(each.data))[0]
        close(answer if isinstance(answer, list) else answer["predictions"])
        assert stat.S_IMODE(each.path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700


def test_bytes_keep_their_type(archive, tmp_path) -> None:
    class Reads(OpenVINOHandler):
        def preprocess(self, data):
            import torch

            return torch.tensor(ROWS * len(data))

        def postprocess(self, output):
            return output.tolist()

    made, handler = started(archive, tmp_path / "kept", Reads)
    made.handle(handler, b"\xff\xd8", **{"Content-Type": "image/jpeg; q=1"})
    made.handle(handler, bytearray(b"1234"))
    made.handle(handler, "plain")
    counts(handler)
    assert sorted((each.path.suffix, each.content_type, each.data) for each in read_folder(tmp_path / "kept")) == [
        (".bin", "application/octet-stream", b"1234"),
        (".jpg", "image/jpeg", b"\xff\xd8"),
        (".txt", "text/plain", b"plain"),
    ]


def test_one_request_in_so_many_is_kept(archive, tmp_path) -> None:
    made, handler = started(archive, tmp_path / "kept", every=5)
    for _ in range(10):
        made.handle(handler, ROWS, ROWS)
    assert counts(handler)["kept"] == 4


def test_limits_stop_it_and_remove_nothing(archive, tmp_path) -> None:
    made, handler = started(archive, tmp_path / "kept", most=2)
    for _ in range(3):
        made.handle(handler, ROWS)
        counts(handler)
    found = counts(handler)
    assert (found["kept"], found["dropped"]) == (2, 1) and "most: 2" in found["reason"]
    made, handler = started(archive, tmp_path / "small", max_mb=0.00004)
    for _ in range(3):
        made.handle(handler, ROWS)
        counts(handler)
    found = counts(handler)
    assert (found["kept"], found["dropped"]) == (1, 2) and "max_mb" in found["reason"]


def test_the_hook_removes_what_must_not_be_kept(archive, tmp_path) -> None:
    made, handler = started(archive, tmp_path / "kept", scrub="record_scrub_one.py")
    made.handle(handler, [[0.5, 1.0, 2.0, 9.0]], [[-1.0, 0.0, 0.0, 0.0]], [[1.0, 6.0, 0.0, 0.0]])
    found = counts(handler)
    assert (found["kept"], found["scrubbed"], found["dropped"]) == (1, 1, 1)
    assert "ValueError: no" in found["reason"]
    (body,) = read_folder(tmp_path / "kept")
    assert json.loads(body.data) == [[0.5, 1.0, 2.0, 0.0]]


@pytest.mark.parametrize("problem", ["missing", "no function", "fails"])
def test_a_hook_that_cannot_run_is_refused_at_load(archive, tmp_path, problem) -> None:
    name = f"record_scrub_{problem.replace(' ', '_')}.py"
    section = {"warmup": WARMUP, "record": {"folder": str(tmp_path / "kept"), "scrub": name}}
    made = archive({"handler": {"openvino": section}}, weights=save_weights)
    if problem != "missing":
        text = "1 / 0" if problem == "fails" else "x = 1"
        (Path(made.context.system_properties["model_dir"]) / name).write_text(text)
    with pytest.raises((ModelLoadError, RuntimeError), match=f"record.scrub.*{name}"):
        TensorHandler().initialize(made.context)


def test_a_folder_of_others_is_refused(archive, tmp_path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises((ModelLoadError, RuntimeError), match=r"record\.folder: .*open is"):
        started(archive, folder)


def test_settings_are_checked() -> None:
    for record, message in (
        ({"every": 5}, "no effect without a folder"),
        ({"folder": "here"}, "absolute path"),
        ({"folder": "/tmp/x", "scrub": "a/b.py"}, "Python file of the archive"),
        ({"folder": "/tmp/x", "every": 0}, "every"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_serving_config({"handler": {"openvino": {"record": record}}})


def test_package_and_check_know_the_hook(tmp_path) -> None:
    config = tmp_path / "model-config.yaml"
    config.write_text(f"handler: {{openvino: {{record: {{folder: {tmp_path}/kept, scrub: my_scrub.py}}}}}}\n")
    with pytest.raises(Exception, match=r"record\.scrub"):
        files_named_by(config)
    (tmp_path / "my_scrub.py").write_text(SCRUB)
    assert tmp_path / "my_scrub.py" in files_named_by(config)


def test_requests_to_other_urls_are_not_kept(archive, tmp_path) -> None:
    made, handler = started(archive, tmp_path / "kept")
    headers = [{"explain": "False", "url_path": "v1/embeddings"}, {"explain": "True"}, {"explain": "False"}]
    made.handle_with(handler, [ROWS, ROWS, ROWS], headers)
    found = counts(handler)
    assert (found["kept"], found["dropped"]) == (1, 2) and "another URL" in found["reason"]


def test_half_a_surrogate_pair_is_kept_as_json(archive, tmp_path) -> None:
    kept = tmp_path / "kept"
    made, handler = started(archive, kept, kind=Echo)
    made.handle(handler, "\ud83d", "text")
    assert counts(handler)["kept"] == 2
    contents = {path.suffix: path.read_bytes() for path in kept.iterdir() if not path.name.startswith(".")}
    assert json.loads(contents[".json"]) == "\ud83d" and contents[".txt"] == b"text"


class Echo(TensorHandler):
    """Answers any text."""

    def decode(self, item: Any) -> Any:
        return super().decode({"body": ROWS})


def test_a_worker_that_packages_records_nothing(archive, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRECOMPILE_ENV, str(tmp_path / "cache"))
    _, handler = started(archive, tmp_path / "kept")
    assert handler._openvino.recorder is None and not (tmp_path / "kept").exists()
