"""The engine on OpenVINO GenAI where things end badly: a full cache, failed steps, a process that dies or hangs."""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import OFF, answers, by_choice, finishes, opened, until

from language_models import VOCABULARY, greedy, prompts
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.errors import BusyError, CompileDiedError, GenerationError, InvalidInputError, ModelLoadError
from torchserve_openvino.generation.text import expected
from torchserve_openvino.generation.text.engine import Sampling
from torchserve_openvino.generation.text.genai.child_process import begun
from torchserve_openvino.generation.text.genai.genai_engine import GenAIEngine
from torchserve_openvino.generation.text.genai.pipeline import PAGE, Pipeline, PipelineSettings

pytest.importorskip("transformers")
pytest.importorskip("openvino_genai")


@pytest.mark.slow
@pytest.mark.usefixtures("nearby", "unhurried")
class TestAFullCache:
    """The cache has room for one sequence of 64 tokens."""

    @pytest.fixture
    def small(self, llama: tuple[Path, Any], exports: Store) -> Iterator[GenAIEngine]:
        # 2 layers, 2 heads, 8 features for keys and values, 4 bytes.
        room = 64 * 2 * 2 * (8 + 8) * 4
        found = opened(llama[0], exports, verify=OFF, cache_gb=room * 1.01e-9, max_waiting=2, max_tokens=8)
        assert found.facts["cache_tokens"] == 64 and found.facts["max_length"] == 64
        yield found.engine
        found.engine.close()

    def test_others_wait_and_one_too_many_is_refused(self, small: GenAIEngine, llama: tuple[Path, Any]) -> None:
        first, second, third = prompts(10, 11, 12)
        streams = [small.submit(prompt, Sampling(40, ignore_eos=True)) for prompt in (first, second, third)]
        assert small.load().waiting == 2
        with pytest.raises(BusyError, match=r"2 prompts already wait .*max_waiting"):
            small.submit(first, Sampling(40))
        wanted = [greedy(llama[1], prompt, 40) for prompt in (first, second, third)]
        assert [by_choice(list(stream))[0] for stream in streams] == wanted

    def test_a_waiting_prompt_can_be_cancelled(self, small: GenAIEngine) -> None:
        first, second, third = (small.submit(prompt, Sampling(40, ignore_eos=True)) for prompt in prompts(9, 9, 9))
        second.cancel()
        assert finishes(list(second)) == {0: "cancelled"}
        assert finishes(list(first)) == finishes(list(third)) == {0: "length"}

    def test_a_prompt_that_never_fits_is_refused(self, small: GenAIEngine) -> None:
        with pytest.raises(InvalidInputError, match="60 tokens, and max_tokens is 5: 65 together, more than 64"):
            small.submit([5] * 60, Sampling(5))
        with pytest.raises(InvalidInputError, match="n=2 sequences of up to 40 tokens need room for 128 tokens"):
            small.submit([5] * 30, Sampling(10, temperature=1.0, n=2))

    def test_closing_ends_all(self, small: GenAIEngine) -> None:
        streams = [small.submit(prompt, Sampling(50, ignore_eos=True)) for prompt in prompts(9, 9)]
        small.close()
        assert [set(finishes(list(stream)).values()) for stream in streams] == [{"cancelled"}] * 2


class TestFailures:
    def test_a_failed_step_fails_its_prompts_and_the_next_go_on(
        self, nearby: None, exports: Store, llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # With the cache of prefixes, another process has to begin: see test_long_prompts.py.
        own = opened(llama[0], exports, verify=OFF, prefix_caching=False).engine
        whole, broken = Pipeline.step, threading.Event()

        def step(pipeline: Pipeline) -> None:
            time.sleep(0.02)
            if broken.is_set():
                broken.clear()
                raise RuntimeError("Exception from here\nthe memory is gone")
            whole(pipeline)

        monkeypatch.setattr(Pipeline, "step", step)
        streams = [own.submit(prompt, Sampling(400, ignore_eos=True)) for prompt in prompts(4, 40)]
        assert streams[1].next(30.0) is not None
        broken.set()
        for stream in streams:
            with pytest.raises(GenerationError, match="the memory is gone"):
                list(stream)
        (prompt,) = prompts(6)
        assert answers(own, [prompt], Sampling(10, ignore_eos=True)) == [[greedy(llama[1], prompt, 10)]]
        assert own.dead is None
        own.close()

    def test_an_engine_that_fails_for_good_says_so(self, own: GenAIEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        def step(pipeline: Pipeline) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(Pipeline, "step", step)
        with pytest.raises(GenerationError, match="the device is gone"):
            list(own.submit([5], Sampling(3)))
        until(lambda: own.dead)
        with pytest.raises(GenerationError, match="stopped after an error: .*the device is gone"):
            own.submit([5], Sampling(3))

    def test_a_fault_of_the_engine_itself_hangs_nobody(self, own: GenAIEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Pipeline, "cache_usage", lambda pipeline: 1 / 0)
        with pytest.raises(GenerationError, match="division by zero"):
            list(own.submit([5], Sampling(300, ignore_eos=True)))


class TestItsProcess:
    @pytest.fixture
    def apart(self, llama: tuple[Path, Any], exports: Store) -> Iterator[tuple[GenAIEngine, psutil.Process]]:
        found = opened(llama[0], exports, verify=OFF)
        yield found.engine, psutil.Process(found.facts["process"])
        found.engine.close()

    def test_it_loads_no_torch_and_prints_where_no_metrics_are(self, apart: tuple[GenAIEngine, psutil.Process]) -> None:
        maps = {Path(each.path).name for each in apart[1].memory_maps()}
        assert not any(name.startswith("libtorch") for name in maps)
        output, errors = (Path(f"/proc/{apart[1].pid}/fd/{number}").readlink() for number in (1, 2))
        assert output == errors

    def test_closing_ends_it(self, apart: tuple[GenAIEngine, psutil.Process]) -> None:
        stream = apart[0].submit([5] * 20, Sampling(400, ignore_eos=True))
        apart[0].close()
        assert set(finishes(list(stream)).values()) <= {"cancelled", "length"}
        assert not apart[1].is_running() and apart[0].dead is None

    def test_one_that_is_killed_fails_its_prompts_and_says_why(self, apart: tuple[GenAIEngine, psutil.Process]) -> None:
        died = threading.Event()
        apart[0].when_dead(died.set)
        streams = [apart[0].submit(prompt, Sampling(450, ignore_eos=True)) for prompt in prompts(4, 40)]
        assert streams[1].next(30.0) is not None
        apart[1].kill()
        for stream in streams:
            with pytest.raises(GenerationError, match=r"ended by SIGKILL.*memory"):
                list(stream)
        assert died.wait(10)
        with pytest.raises(GenerationError, match="SIGKILL"):
            apart[0].submit([5], Sampling(3))
        again = threading.Event()
        apart[0].when_dead(again.set)
        assert again.is_set() and not apart[1].is_running()

    def test_one_that_hangs_is_ended(
        self, apart: tuple[GenAIEngine, psutil.Process], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torchserve_openvino.generation.text.genai.genai_engine._CLOSE_SECONDS", 0.2)
        apart[1].suspend()
        stream = apart[0].submit([5], Sampling(3))
        apart[0].close()
        assert finishes(list(stream)) == {0: "cancelled"} and not apart[1].is_running()

    @pytest.mark.slow
    def test_it_ends_with_its_worker(self, llama: tuple[Path, Any], exports: Store) -> None:
        """Even with one that is killed."""
        code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from engines import opened
from torchserve_openvino.cache.storage.store import Store
from torchserve_openvino.generation.text import expected
from torchserve_openvino.generation.text.engine import Sampling
found = opened(Path({str(llama[0])!r}), Store(Path({str(exports.root)!r})), verify={OFF!r})
found.engine.submit([5], Sampling(400, ignore_eos=True)).next(10.0)
print(found.facts["process"], flush=True)
time.sleep(60)
"""
        worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        child = psutil.Process(int(worker.stdout.readline()))
        worker.kill()
        worker.communicate()
        child.wait(20)

    def test_a_model_that_it_cannot_load(self, tmp_path: Path) -> None:
        (tmp_path / "openvino_model.xml").write_text("no model")
        settings = PipelineSettings("CPU", {}, 8, 64, False)
        with begun() as made, pytest.raises(ModelLoadError, match="cannot load the exported model"):
            made.load(tmp_path, settings, [2])

    def test_one_that_gets_no_model_ends(self) -> None:
        before = set(psutil.Process().children())
        with begun():
            (process,) = set(psutil.Process().children()) - before
        assert not process.is_running()


@pytest.mark.slow
def test_a_thousand_random_prompts_a_third_of_them_bad(llama: tuple[Path, Any], exports: Store) -> None:
    """No answer is lost, pages and memory are back where they were."""
    made = opened(llama[0], exports, verify=OFF, max_waiting=2000)
    found, draw, process = made.engine, random.Random(5), psutil.Process(made.facts["process"])
    wanted: dict[tuple[int, ...], list[int]] = {}
    memory = 0
    for turn in range(1000):
        prompt = tuple(draw.choices(range(3, VOCABULARY), k=draw.choice((1, 3, 20, 60))))
        kind = draw.randrange(6)
        if kind == 0:
            with pytest.raises(InvalidInputError):
                found.submit([*prompt, VOCABULARY + 5], Sampling(4))
        elif kind == 1:
            stream = found.submit(prompt, Sampling(300, temperature=1.0, n=draw.randint(1, 3), ignore_eos=True))
            stream.next(0.05)
            stream.cancel()
            assert set(finishes(list(stream)).values()) <= {"cancelled", "length"}
        elif kind == 2:
            list(found.submit(prompt, Sampling(8, temperature=0.9, n=2)))
        else:
            got = by_choice(list(found.submit(prompt, Sampling(8, ignore_eos=True))))[0]
            if len(wanted) < 40:
                wanted[prompt] = greedy(llama[1], list(prompt), 8)
            assert got == wanted.get(prompt, got) and len(got) == 8
        if turn == 200:
            memory = process.memory_info().rss
    until(lambda: found.load().running == 0)
    assert found._free_pages == 512 * 8 // PAGE
    assert process.memory_info().rss - memory < 64 * 2**20
    found.close()


def test_a_model_that_the_compiler_does_not_survive_is_refused(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the engine `compile` may take it (`tasks/generation/engines.py`)."""

    def dies(*arguments: Any) -> None:
        raise CompileDiedError("OpenVINO's compiler died (SIGFPE)")

    monkeypatch.setattr(expected, "compile_as_is", dies)
    with pytest.raises(ModelLoadError, match="SIGFPE"):
        opened(llama[0])
