"""First stage of the tuner, without servers: which ways to compute are right, and how fast each of them is."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from torchserve_openvino.bench.bodies import Body
from torchserve_openvino.bench.statistics import Interval
from torchserve_openvino.config.openvino.precisions import BF16X3, unsupported
from torchserve_openvino.errors import ConfigError
from torchserve_openvino.tune import candidates
from torchserve_openvino.tune.archives import EAGER, Variants
from torchserve_openvino.tune.candidates import Candidate, ComputeSettings
from torchserve_openvino.tune.keys import OPENVINO, KeyPath
from torchserve_openvino.tune.offered_options import TEXT_GENERATOR, Option, effect, offered, worth_taking
from torchserve_openvino.tune.profile import Process, Profile, Tell, WorkerFailedError, profile
from torchserve_openvino.tune.proof import ModelAnswer
from torchserve_openvino.tune.request_sizes import ONE_GRAPH, RequestSizes
from torchserve_openvino.tune.settings import Settings

_SIZES = (1, 2, 4, 8, 16, 32)
# All ways to compute are loaded at once: graphs of their own for each shape are tried up to so many bytes of weights.
_MOST_COPIES = 1024**3
K = TypeVar("K", bound=Hashable)


class FirstStage:
    """Proves ways to compute against eager PyTorch, and times them in turns, each in a process of its own.

    Args:
        variants: The archive.
        requests: Bodies to answer.
        settings: What to try.
        cores: Cores that all workers share.
        environment: Of each process.
        tell: Gets a line of progress.
    """

    def __init__(
        self, variants: Variants, requests: Sequence[Body], settings: Settings, cores: int,
        environment: Mapping[str, str], tell: Tell,
    ) -> None:  # fmt: skip
        self._variants, self._requests, self._settings = variants, requests, settings
        self._cores, self._environment, self._tell = cores, environment, tell
        self.present = candidates.present_of(variants.config, cores)

    @cached_property
    def expected(self) -> list[ModelAnswer]:
        """Eager PyTorch's answers to the requests.

        Raises:
            ConfigError: It does not load, or does not answer a request.
        """
        self._tell("what eager PyTorch answers")
        archive = self._variants.make(EAGER)
        try:
            with Process(archive, self._requests, self._environment) as process:
                answers = process.answers()
                seen = process.sizes()
        except WorkerFailedError as error:
            raise ConfigError(f"eager PyTorch cannot serve it: {error}", location=self._variants.name) from error
        finally:
            archive.unlink()
        for body, answer in zip(self._requests, answers, strict=True):
            if answer.status != 200:
                text = answer.body[:300].decode(errors="replace")
                raise ConfigError(f"is answered {answer.status} by eager PyTorch: {text}", location=str(body.path))
        self._seen = RequestSizes.from_plain(seen, max(self._few_sizes()))
        return answers

    @property
    def sizes(self) -> RequestSizes:
        """Sizes of the requests; known once eager PyTorch answered them.

        Raises:
            ConfigError: As `expected`.
        """
        # Its answers come with the sizes.
        _ = self.expected
        return self._seen

    def options(self) -> list[Option]:
        """Returns the values of further keys to try, without those that follow from the sizes of the requests."""
        return offered(self._variants.config, self._variants.task, self._settings.options)

    @property
    def may_fit(self) -> bool:
        """Whether values that follow from the sizes of the requests are tried, if the sizes differ."""
        if self._settings.length_counts is None:
            return self._settings.options is None and self._variants.task != TEXT_GENERATOR
        return bool(self._settings.length_counts)

    def fitted(self) -> list[Option]:
        """Returns the values to try that follow from the sizes of the requests.

        Raises:
            ConfigError: As `expected`.
        """
        if not self.may_fit:
            return []
        named = {option.path: option for option in self.options()}
        return [option for option in self.sizes.options(self._settings.length_counts) if option.path not in named]

    def engines(self, options: tuple[Option, ...] = ()) -> list[ComputeSettings]:
        """Returns the ways to compute, all but the present one with some values of further keys."""
        return candidates.engines(self.present, self._cores, self._precisions(), options)

    def run(self) -> Profile:
        """Returns what all ways to compute do, with the values of further keys that make calls faster."""
        options, effects = self._options_worth_taking()
        sizes = self._settings.batch_sizes or list(_SIZES)
        result = self._timed(self.engines(options), sizes, self.present.engine)
        if options and not any(engine.options for engine in result.times):
            # Each of them gave right answers, but not together.
            rejected = result.rejected
            result = self._timed(self.engines(), sizes, self.present.engine)
            result.rejected = {**rejected, **result.rejected}
        result.options = effects
        result.sizes = self.sizes.to_plain()
        return result

    def effects(self, ways: Mapping[K, ComputeSettings]) -> dict[K, Interval | str]:
        """Returns how many times as fast calls are in other ways, all else equal, or why a way is out.

        Args:
            ways: Each differs from the present precision on all cores in one respect.
        """
        plain = ComputeSettings(self.present.engine.precision, self._cores)
        known = self._timed([plain, *ways.values()], self._few_sizes(), plain)
        if plain not in known.times:
            return dict.fromkeys(ways, f"nothing to compare with: {known.rejected.get(plain, 'not timed')}")
        return {
            name: effect(known.rounds[plain], known.rounds[engine])
            if engine in known.times
            else known.rejected.get(engine, "not timed")
            for name, engine in ways.items()
        }

    def _options_worth_taking(self) -> tuple[tuple[Option, ...], dict[str, str]]:
        """Returns the values of further keys that make calls faster, each by itself, and what all of them did."""
        options, results = [], {}
        for option in [*self.options(), *self.fitted()]:
            if (copies := self._copies(option)) > _MOST_COPIES:
                results[str(option)] = (
                    f"not tried: its graphs would hold {copies / 1e9:.1f} GB of weights in each worker"
                )
            else:
                options.append(option)
        if not options:
            return (), results
        effects = self.effects({
            option: ComputeSettings(self.present.engine.precision, self._cores, options=(option,)) for option in options
        })  # fmt: skip
        results |= {
            str(option): (f"{gain} times as fast" if isinstance(gain, Interval) else gain)
            + (f" ({option.why})" if option.why else "")
            for option, gain in effects.items()
        }
        return worth_taking(
            {option: effect for option, effect in effects.items() if isinstance(effect, Interval)}
        ), results

    def _copies(self, option: Option) -> int:
        """Returns about how many bytes of weights a worker holds, if an option gives each shape a graph; else 0."""
        if option.changes.get(ONE_GRAPH, True):
            return 0
        compiled: dict[KeyPath, Any] = {length.path: length.compiled for length in self.sizes.lengths}
        lengths = math.prod(len(option.changes.get(path, present)) for path, present in compiled.items())
        batches = max(self._settings.batch_sizes or _SIZES).bit_length()
        return lengths * batches * self._variants.bytes

    def _timed(self, engines: Sequence[ComputeSettings], sizes: Sequence[int], baseline: ComputeSettings) -> Profile:
        """Proves engines, and times calls of so many requests; none may fall back where the baseline does not."""
        expected = self.expected
        archives = {engine: self._variants.make(self._changes(engine, max(sizes))) for engine in engines}
        try:
            return profile(archives, expected, self._requests, sizes, self._environment, self._tell, baseline)
        finally:
            for path in archives.values():
                path.unlink()

    def _changes(self, engine: ComputeSettings, most: int) -> dict[KeyPath, Any]:
        # One worker: each process stands for one.
        largest = self.present.batch_size if self.present.joins else most
        alone: Candidate = replace(self.present, engine=engine, workers=1, batch_size=largest)
        changed = candidates.changes(alone, self.present, self._variants.config)
        changed |= self.sizes.needed(changed)
        return {**changed, (*OPENVINO, "threads"): engine.threads, ("batchSize",): alone.batch_size}

    def _few_sizes(self) -> list[int]:
        """Returns the smallest and a middle batch size."""
        sizes = sorted(self._settings.batch_sizes or _SIZES)
        return sorted({sizes[0], sizes[len(sizes) // 2]})

    def _precisions(self) -> list[str]:
        config = self._variants.config
        if self._variants.task == TEXT_GENERATOR and self._settings.precisions is None:
            # Its precision is that of its weights, one of the further keys.
            return [candidates.precision_of(config)]
        names = self._settings.precisions or ["f32", "bf16x3", "bf16"]
        # OpenVINO's own property, if the YAML sets that, has no bf16x3.
        pinned = candidates.precision_is_pinned(config)
        return [name for name in names if unsupported(name, "CPU") is None and not (pinned and name == BF16X3)]
