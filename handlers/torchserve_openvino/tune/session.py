"""One run of the tuner: plan, first stage, search on real servers, confirmation, and what is written."""

import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from torchserve_openvino.bench.bodies import Body, content_type
from torchserve_openvino.bench.machine import machine
from torchserve_openvino.bench.statistics import QuantileClaim, claim_quantile
from torchserve_openvino.bench.torchserve_process import TorchServeError
from torchserve_openvino.errors import ConfigError, first_line
from torchserve_openvino.files.atomic import write_atomically
from torchserve_openvino.files.json_text import read_json
from torchserve_openvino.serving.threads import usable_cores
from torchserve_openvino.tune import candidates
from torchserve_openvino.tune.archives import Variants
from torchserve_openvino.tune.candidates import Candidate, ComputeSettings
from torchserve_openvino.tune.first_stage import FirstStage
from torchserve_openvino.tune.offered_options import Option
from torchserve_openvino.tune.profile import Profile, Tell
from torchserve_openvino.tune.search import RejectedError, Search, SearchResult, Standing
from torchserve_openvino.tune.settings import Settings
from torchserve_openvino.tune.trial import Bench, Trial, environment_for

# Real servers are measured for the present configuration and so many others.
_RIVALS = 4
# The seed of its arrivals: of no round.
_CONFIRMATION = 900


@dataclass
class Result:
    """What a run of the tuner found.

    Attributes:
        choice: All candidates with their scores, and the winner.
        present: The configuration of the archive.
        profile: What the first stage knows.
        predicted: Rates in requests/s that the queueing model predicts.
        trials: All measurements of real servers, in order, each with its candidate.
        confirmation: Five windows in a row of the winner, started once more; None without one, or after an interrupt.
        unconfirmed: Why the winner could not serve when it was started once more; empty if it could.
        claim: What the confirmation says about the p99; None without a limit or a winner.
        seconds: How long all of it took.
        interrupted: Whether the user ended it early.
    """

    choice: SearchResult[Candidate]
    present: Candidate
    profile: Profile
    predicted: dict[Candidate, float]
    trials: list[tuple[Candidate, Trial]]
    confirmation: Trial | None = None
    unconfirmed: str = ""
    claim: QuantileClaim | None = None
    seconds: float = 0.0
    interrupted: bool = False


@dataclass
class Session:
    """A run of the tuner.

    Args:
        archive: The .mar.
        requests: Folder of request bodies; None takes the archive's warm-up samples.
        settings: Limits and effort.
        state: File in which trials are kept, so that an interrupted run goes on.
        tell: Gets a line of progress.

    """

    archive: Path
    requests: Sequence[Body]
    settings: Settings
    state: Path
    tell: Tell

    def plan(self, variants: Variants) -> str:
        """Returns what will be done, in a few lines."""
        stage = self._first_stage(variants, {})
        options = stage.options()
        names = [*map(str, options), *(["lengths and batch sizes that fit the requests"] if stage.may_fit else [])]
        further = f" Before that, one by one: {'; '.join(names)}." if names else ""
        return (
            f"{variants.name} on {self.cores} core(s), {len(self.requests)} different requests.\n"
            f"Present: {stage.present}.\n"
            f"1. {len(stage.engines())} ways to compute are proven against eager PyTorch and timed in turns.{further}\n"
            f"2. The present configuration and the {_RIVALS} most promising others are measured on real servers, in "
            f"rounds, at most {self.settings.trials} starts, about {self.settings.minutes:g} minutes.\n"
            "3. The winner is started once more, and its rate must hold in five windows in a row."
        )

    def run(self, variants: Variants, scratch: Path) -> Result:
        """Runs all stages.

        Args:
            variants: The archive.
            scratch: Folder for caches.

        Raises:
            ConfigError: No request is answered, or eager PyTorch does not load.
        """
        begin = time.monotonic()
        environment = environment_for(scratch / "cache")
        stage = self._first_stage(variants, environment)
        present, expected = stage.present, stage.expected
        state = State(self.state, self._fingerprint(variants))
        known = state.profile
        if known is None:
            known = stage.run()
            state.keep_profile(known)
        rivals = candidates.ranked(present, known.times, self.settings, self.cores, _RIVALS)
        predicted = dict(rivals)
        bench = Bench(variants.store, variants.name, self.requests, expected, self.settings, environment, self.tell)
        trials = _Trials(bench, variants, present, predicted, state, self.settings)
        deadline = begin + self.settings.minutes * 60
        search: Search[Candidate] = Search(
            trials.score, self.settings.trials, random.Random(self.settings.seed), tick=self._show,
            may_continue=lambda: time.monotonic() < deadline,
        )  # fmt: skip
        interrupted = False
        choice: SearchResult[Candidate]
        try:
            choice = search.run(present, [candidate for candidate, _ in rivals])
        except KeyboardInterrupt:
            interrupted = True
            choice = search.so_far()
        result = Result(choice, present, known, predicted, trials.done, interrupted=interrupted)
        if choice.best is not None and not interrupted:
            try:
                result.confirmation = trials.confirm(choice.best.candidate)
            except RejectedError as error:
                result.unconfirmed = str(error)
                result.choice = choice.without_winner(result.unconfirmed)
            except KeyboardInterrupt:
                result.interrupted = True
        best = result.choice.best
        result.claim = trials.claim(best.candidate) if best is not None else None
        result.seconds = time.monotonic() - begin
        return result

    @property
    def cores(self) -> int:
        """Cores that all workers share."""
        return min(self.settings.cores or usable_cores(), usable_cores())

    def _first_stage(self, variants: Variants, environment: Mapping[str, str]) -> FirstStage:
        return FirstStage(variants, self.requests, self.settings, self.cores, environment, self.tell)

    def _fingerprint(self, variants: Variants) -> str:
        """Returns a digest of all that the measurements depend on."""
        digest = hashlib.sha256()
        parts = (variants.text, self.settings.model_dump_json(), json.dumps(machine(self.cores), sort_keys=True))
        for part in (*map(str.encode, parts), *(body.data for body in self.requests)):
            digest.update(len(part).to_bytes(8, "little") + part)
        with self.archive.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
        return digest.hexdigest()[:16]

    def _show(self, standings: list[Standing[Candidate]]) -> None:
        able = [standing for standing in standings if math.isfinite(standing.score)]
        if able:
            best = max(able, key=lambda standing: standing.score)
            self.tell(f"best so far: {best.candidate} with {best.score:.1f}")


def requests_for(folder: list[Body] | None, variants: Variants) -> tuple[list[Body], list[str]]:
    """Returns the requests to send and a warning about them, if any.

    Args:
        folder: What the user gave.
        variants: The archive, whose warm-up samples are taken otherwise.

    Raises:
        ConfigError: There are neither.
    """
    if folder is not None:
        return folder, []
    samples = [path for path in variants.samples() if path.is_file()]
    if not samples:
        raise ConfigError(
            "has no warmup.samples, so there is nothing to send; give requests: --requests FOLDER.",
            location=variants.name, key="requests",
        )  # fmt: skip
    warning = (
        f"only the archive's {len(samples)} warm-up sample(s) are sent. A few repeated inputs mislead where the time "
        "depends on the input; give real ones: --requests FOLDER."
    )
    return [Body(path, content_type(path)) for path in samples], [warning]


class _Trials:
    """Measures candidates, remembers each trial in a file, and repeats none that is there."""

    def __init__(
        self, bench: Bench, variants: Variants, present: Candidate, predicted: dict[Candidate, float], state: "State",
        settings: Settings,
    ) -> None:  # fmt: skip
        self._bench, self._variants, self._present = bench, variants, present
        self._predicted, self._state, self._settings = predicted, state, settings
        self.done: list[tuple[Candidate, Trial]] = []
        self._rounds: dict[Candidate, int] = {}

    def score(self, candidate: Candidate) -> float:
        """Measures a candidate; a trial of an earlier run counts as it is.

        Raises:
            RejectedError: The candidate can't serve.
        """
        turn = self._rounds[candidate] = self._rounds.get(candidate, 0) + 1
        key = f"{candidate}#{turn}"
        record = self._state.trial(key)
        if record is None:
            record = self._measure(candidate, turn)
            self._state.keep_trial(key, record)
        return self._read(candidate, record).score(self._settings.goal)

    def confirm(self, candidate: Candidate) -> Trial | None:
        """Starts the winner once more, and measures its rate; None if it had none.

        Raises:
            RejectedError: It could not serve again.
        """
        rates = [trial.rate for other, trial in self.done if other == candidate and trial.rate]
        if not rates:
            return None
        key, rate = f"{candidate}#confirmed", self._settings.rate or statistics.median(rates)
        record = self._state.trial(key)
        if record is None:
            self._bench.tell(f"{candidate} once more, at {rate:.1f} requests/s")
            record = self._started(
                candidate,
                lambda archive: self._bench.confirm(archive, candidate.engine.precision, rate, _CONFIRMATION),
            )
            self._state.keep_trial(key, record)
        return self._read(candidate, record)

    def claim(self, candidate: Candidate) -> QuantileClaim | None:
        """Returns what the windows at the winner's rate say about its p99, taken together."""
        if self._settings.p99 is None:
            return None
        rates = [trial.rate for other, trial in self.done if other == candidate and trial.rate]
        lowest = min(rates, default=0.0)
        windows = [
            window for other, trial in self.done if other == candidate for window in trial.windows
            if window["rate"] <= lowest and not window["disturbed"]
        ]  # fmt: skip
        return claim_quantile(sum(window["requests"] for window in windows), sum(window["late"] for window in windows))

    def _read(self, candidate: Candidate, record: dict[str, Any]) -> Trial:
        if record.get("rejected"):
            raise RejectedError(record["rejected"], record.get("excess", math.inf))
        trial = Trial(**record["trial"])
        self.done.append((candidate, trial))
        return trial

    def _measure(self, candidate: Candidate, turn: int) -> dict[str, Any]:
        self._bench.tell(f"{candidate}, round {turn}")
        earlier = [trial.rate for other, trial in self.done if other == candidate and trial.rate]
        start = earlier[-1] if earlier else self._predicted.get(candidate, 0.0)
        return self._started(
            candidate, lambda archive: self._bench.run(archive, candidate.engine.precision, start, turn)
        )

    def _started(self, candidate: Candidate, measure: Callable[[Path], Trial]) -> dict[str, Any]:
        """Returns the record of a trial with a candidate's archive, or of its rejection."""
        archive = self._variants.make(candidates.changes(candidate, self._present, self._variants.config))
        reason = ""
        try:
            # A server that dies once may be the machine's fault.
            for _ in range(2):
                try:
                    return {"trial": asdict(measure(archive))}
                except TorchServeError as error:
                    reason = f"its server died twice: {first_line(error)}"
                except RejectedError as error:
                    # JSON has no infinity.
                    excess = {"excess": error.excess} if math.isfinite(error.excess) else {}
                    return {"rejected": str(error), **excess}
        finally:
            archive.unlink(missing_ok=True)
        return {"rejected": reason}


class State:
    """What an interrupted run leaves in a file: the first stage, and each trial.

    Args:
        path: The file.
        fingerprint: Of what is tuned and how; a file of another one is not read, and replaced.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        try:
            stored = read_json(path)
        except (OSError, ValueError):
            # There is none yet, or it was damaged: everything is measured anew.
            stored = None
        same = isinstance(stored, dict) and stored.get("fingerprint") == fingerprint
        self._content: dict[str, Any] = dict(stored) if same else {"fingerprint": fingerprint, "trials": {}}

    @property
    def profile(self) -> Profile | None:
        """The results of the first stage; None if it did not end."""
        stored = self._content.get("profile")
        if stored is None:
            return None
        times = {_engine(key): {int(size): ms for size, ms in by_size.items()} for key, by_size in stored["times"]}
        rejected = {_engine(key): reason for key, reason in stored["rejected"]}
        return Profile(times, rejected, options=stored["options"], sizes=stored["sizes"])

    def keep_profile(self, known: Profile) -> None:
        """Writes the results of the first stage."""
        times = [(astuple(engine), by_size) for engine, by_size in known.times.items()]
        rejected = [(astuple(engine), reason) for engine, reason in known.rejected.items()]
        self._content["profile"] = {
            "times": times, "rejected": rejected, "options": known.options, "sizes": known.sizes,
        }  # fmt: skip
        self._write()

    def trial(self, key: str) -> dict[str, Any] | None:
        """Returns the record of a trial; None if it was not made."""
        return self._content["trials"].get(key)

    def keep_trial(self, key: str, record: dict[str, Any]) -> None:
        """Writes the record of a trial."""
        self._content["trials"][key] = record
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(self._content, indent=1).encode(), sync=False)


def _engine(stored: Sequence[Any]) -> ComputeSettings:
    """Returns the engine that `astuple` made lists of."""
    precision, threads, streams, options = stored
    return ComputeSettings(precision, threads, streams, tuple(_option(*option) for option in options))


def _option(path: Sequence[str], text: str, followers: Sequence[tuple[Sequence[str], str]], why: str) -> Option:
    return Option(tuple(path), text, tuple((tuple(key), value) for key, value in followers), why)
