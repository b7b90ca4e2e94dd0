"""Starts of a language model, from nothing to the first token: this package's engine from a warm cache, GenAI bare.

Each is a process of its own. Both read the same exported model.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import output
from benchmarks.generation import MODELS, random_model

_OURS = """
import sys
from pathlib import Path
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.config.sections.generate import GenerateSection
from torchserve_openvino.config.sections.openvino_section import VerifySection
from torchserve_openvino.generation.text.engine import Sampling
from torchserve_openvino.generation.text.opening import open_engine
from torchserve_openvino.generation.text.engine_settings import EngineSettings
folder = Path(sys.argv[1])
settings = EngineSettings(folder / "model", GenerateSection(max_length=2048), VerifySection(), 2)
opened = open_engine(settings, Store(folder / "cache"))
print(next(iter(opened.engine.submit([5, 6, 7], Sampling(1)))), flush=True)
print(opened.facts["seconds"], file=sys.stderr)
opened.engine.close()
"""
_BARE = """
import sys
import numpy as np
import openvino as ov
import openvino_genai as genai
scheduler = genai.SchedulerConfig()
scheduler.cache_size, scheduler.num_kv_blocks = 0, 512
properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 2}
pipe = genai.ContinuousBatchingPipeline(sys.argv[1] + "/exported", scheduler, "CPU", properties)
config = genai.GenerationConfig()
config.max_new_tokens, config.eos_token_id, config.stop_token_ids = 1, 2, {2}
print(pipe.generate([ov.Tensor(np.array([[5, 6, 7]], dtype=np.int64))], [config])[0].m_generation_ids, flush=True)
"""


def starts(work: Path, turns: int) -> dict[str, Any]:
    """Measures both in turns.

    Args:
        work: An empty folder.
        turns: How often each starts.

    Returns:
        Median seconds of each until its first token, their ratio, and all figures.
    """
    model = random_model(MODELS["grouped"], 2048)
    model.save_pretrained(work / "model")
    save_export(model, work / "exported")
    seconds: dict[str, list[float]] = {"this package, warm": [], "OpenVINO GenAI bare": []}
    codes = dict(zip(seconds, (_OURS, _BARE), strict=True))
    output.progress.print("start: filling the cache")
    _once(_OURS, work)
    for turn in range(turns):
        output.progress.print(f"start: turn {turn + 1} of {turns}")
        for name, code in codes.items():
            seconds[name].append(_once(code, work))
    return figures(seconds)


def save_export(model: Any, folder: Path) -> None:
    """Exports a language model of transformers into a new folder, as OpenVINO GenAI reads it."""
    import openvino as ov

    from torchserve_openvino.generation.text.exporting.exported_language_model import export

    folder.mkdir()
    ov.save_model(export(model).model, folder / "openvino_model.xml", compress_to_fp16=False)


def figures(seconds: dict[str, list[float]], skipped: int = 0) -> dict[str, Any]:
    """The medians of ours and of the bare start, in this order, without the first ones; their ratio, and all."""
    ours, bare = (statistics.median(times[skipped:]) for times in seconds.values())
    return {"ours_seconds": ours, "bare_seconds": bare, "ratio": ours / bare, "all": seconds}


def _once(code: str, work: Path) -> float:
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", code, str(work)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.perf_counter() - began
    if not line or process.returncode:
        raise RuntimeError(f"the process ended with exit code {process.returncode}")
    return took
