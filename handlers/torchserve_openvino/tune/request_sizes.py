"""Compiled lengths and batch sizes that fit the requests: chosen so that little of a call is padding."""

import json
import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchserve_openvino.tune.keys import OPENVINO, KeyPath
from torchserve_openvino.tune.offered_options import Option

DEFAULT_COUNTS = (4, 8)
MODE: KeyPath = (*OPENVINO, "batching", "mode")
BUCKETS: KeyPath = (*OPENVINO, "batching", "buckets")
ONE_GRAPH: KeyPath = (*OPENVINO, "batching", "one_graph")
# Lists with less to save than this share of the computed length are not worth a process.
_SMALLEST_SAVING = 0.03
# Lengths are rounded up to this share of the longest one: another sample of requests has slightly other lengths.
_STEPS = 64
# Separate graphs for each length are tried with so many lengths at most: each holds a copy of the weights.
_SEPARATE = 4
# Choosing among more different lengths takes long, and changes little.
_MOST_DISTINCT = 256
_DRAWS = 64


@dataclass(frozen=True)
class Lengths:
    """Lengths of the requests along one named dimension.

    Attributes:
        key: Key of the compiled lengths, such as `text.lengths`.
        seen: Length of each row, in the unit of the key.
        compiled: Present compiled lengths, ascending; the last one is the longest that is accepted.
    """

    key: str
    seen: list[int]
    compiled: list[float]

    @property
    def path(self) -> KeyPath:
        """The key from the top of the YAML."""
        return (*OPENVINO, *self.key.split("."))

    def padding(self, compiled: Sequence[float]) -> float:
        """Returns the share of the computed length that is padding, if each row runs alone.

        Args:
            compiled: Compiled lengths, ascending; the last one is at least the longest row.
        """
        computed = sum(_padded(length, compiled) for length in self.seen)
        return max(0.0, 1 - sum(self.seen) / computed) if computed else 0.0

    def summary(self) -> str:
        """Returns the lengths in a few words."""
        ordered = sorted(self.seen)
        middle, high = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.9))
        return f"{len(ordered)} rows of length {ordered[0]} to {ordered[-1]}, median {middle}, 90 % up to {high}"


def _padded(length: int, compiled: Sequence[float]) -> float:
    """Returns the compiled length that a row is padded to, or cut to beyond the last one."""
    return compiled[min(bisect_left(compiled, length), len(compiled) - 1)]


@dataclass(frozen=True)
class RequestSizes:
    """Sizes of the requests as the model gets them.

    Attributes:
        lengths: Along each named dimension.
        rows: Rows of each request.
        mode: Present `batching.mode`.
        batches: Present compiled batch sizes, ascending, for the largest batch of the first stage.
    """

    lengths: list[Lengths] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    mode: str = "bucket"
    batches: list[int] = field(default_factory=list)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], largest: int) -> "RequestSizes":
        """Reads what a process of the first stage has seen.

        Args:
            plain: Result of `observing.Observed.to_plain`.
            largest: Most requests of a call in the first stage.
        """
        buckets = plain["buckets"]
        sizes = {2**n for n in range(largest.bit_length()) if 2**n < largest} if buckets == "auto" else set(buckets)
        batches = sorted({*sizes, largest}) if max(sizes, default=0) < largest else sorted(sizes)
        return cls([Lengths(**length) for length in plain["lengths"]], list(plain["rows"]), plain["mode"], batches)

    def to_plain(self) -> dict[str, Any]:
        """Returns the sizes with the padding of the present lengths, JSON-safe."""
        lengths = [
            {
                **asdict(length),
                "summary": length.summary(),
                "padding": length.padding(length.compiled) if self._pads else 0.0,
            }
            for length in self.lengths
        ]
        return {"lengths": lengths, "rows": self.rows, "mode": self.mode}

    def needed(self, changed: Mapping[KeyPath, Any]) -> dict[KeyPath, list[float]]:
        """Returns the compiled lengths that the requests need, where those are fewer than all.

        Where only these requests are timed, the time to compile and verify the others can be saved.

        Args:
            changed: Keys of the YAML that are changed, and their values.
        """
        if changed.get(MODE, self.mode) != "bucket":
            return {}
        result = {}
        for length in self.lengths:
            compiled = changed.get(length.path, length.compiled)
            needed = {_padded(row, compiled) for row in length.seen}
            if needed and len(needed) < len(compiled):
                # Whole numbers of tokens, or parts of seconds.
                result[length.path] = [int(size) if size == int(size) else size for size in sorted(needed)]
        return result

    @property
    def _pads(self) -> bool:
        return self.mode == "bucket"

    def options(self, counts: Sequence[int] | None = None) -> list[Option]:
        """Returns the values to try that follow from the sizes.

        Args:
            counts: How many compiled lengths or batch sizes to try; None for the usual ones.
        """
        if self.mode == "exact":
            # Any other list would refuse or accept other requests.
            return []
        counts = DEFAULT_COUNTS if counts is None else counts
        result = [option for length in self.lengths for option in self._of_lengths(length, counts)]
        if self._pads and counts and any(len(set(length.seen)) > 1 for length in self.lengths):
            why = f"no length is padded; {'; '.join(length.summary() for length in self.lengths)}"
            result.append(Option(MODE, '"dynamic"', why=why))
        return result + (self._of_batches() if self._pads and counts else [])

    def _of_lengths(self, lengths: Lengths, counts: Sequence[int]) -> list[Option]:
        if lengths.compiled[-1] % 1:
            # Fitted lengths are whole numbers: the next lower one would refuse what is answered now.
            return []
        before = lengths.padding(lengths.compiled) if self._pads else 0.0
        back = () if self._pads else ((MODE, '"bucket"'),)
        result: dict[str, Option] = {}
        for count in counts:
            chosen = fitted_lengths(lengths.seen, count, int(lengths.compiled[-1]))
            after = lengths.padding(chosen)
            if list(map(float, chosen)) == list(map(float, lengths.compiled)):
                continue
            why = f"{lengths.summary()}; padding {before:.0%} before, {after:.0%} after"
            text = json.dumps(chosen)
            if (1 - before) / (1 - after) < 1 - _SMALLEST_SAVING or not self._pads:
                result[text] = Option(lengths.path, text, back, why=why)
            if count <= _SEPARATE and after < before + _SMALLEST_SAVING:
                separate = Option(lengths.path, text, (*back, (ONE_GRAPH, "false")), why=f"{why}; a graph for each")
                result[f"{text} separate"] = separate
        return list(result.values())

    def _of_batches(self) -> list[Option]:
        """Returns batch sizes that fit requests of several rows; with one row each, every size comes up."""
        if not self.rows or max(self.rows) == 1 or not self.batches:
            return []
        largest, rng, parts = self.batches[-1], random.Random(0), []
        requests = 1
        while requests <= largest:
            for _ in range(_DRAWS):
                rows = sum(rng.choices(self.rows, k=requests))
                # A larger batch is split evenly.
                parts.append(math.ceil(rows / math.ceil(rows / largest)))
            requests *= 2
        chosen = fitted_lengths(parts, len(self.batches), largest, steps=largest)
        batches = Lengths("batching.buckets", parts, list(map(float, self.batches)))
        before, after = batches.padding(batches.compiled), batches.padding(chosen)
        if (1 - before) / (1 - after) >= 1 - _SMALLEST_SAVING:
            return []
        why = (
            f"requests of {min(self.rows)} to {max(self.rows)} rows; padded rows {before:.0%} before, {after:.0%} after"
        )
        return [Option(BUCKETS, json.dumps(chosen), why=why)]


def fitted_lengths(seen: Sequence[int], count: int, longest: int, steps: int = _STEPS) -> list[int]:
    """Returns the compiled lengths with the least padding.

    Exact, by dynamic programming over the different lengths. The longest accepted length stays as it is, so that no
    request is refused that was answered before; between it and the longest that was seen lie its doublings, for
    requests that the sample lacks.

    Args:
        seen: Length of each row.
        count: Lengths up to the longest one that was seen.
        longest: Longest length that is accepted.
        steps: Lengths are multiples of ``longest / steps``.
    """
    step = max(1, longest // steps)
    while True:
        weights = Counter(min(longest, -(-max(length, 1) // step) * step) for length in seen)
        if len(weights) <= _MOST_DISTINCT:
            break
        step *= 2
    chosen = _least_padding(sorted(weights), weights, count)
    further = chosen[-1] * 2 if chosen else longest
    while further < longest:
        chosen.append(further)
        further *= 2
    return sorted({*chosen, longest})


def _least_padding(lengths: Sequence[int], weights: Mapping[int, int], count: int) -> list[int]:
    """Returns at most ``count`` of the lengths, the last one included, to which all are padded at the least cost."""
    rows, total = [0], [0]
    for length in lengths:
        rows.append(rows[-1] + weights[length])
        total.append(total[-1] + weights[length] * length)

    def cost(first: int, last: int) -> int:
        """Returns the padding of lengths ``first`` to ``last - 1``, padded to the last of them."""
        return (rows[last] - rows[first]) * lengths[last - 1] - (total[last] - total[first])

    if not lengths:
        return []
    # best[end]: the least padding of the first lengths with so many groups, and their ends.
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())] + [(cost(0, end), (end,)) for end in range(1, len(lengths) + 1)]
    for _ in range(min(count, len(lengths)) - 1):
        best = [best[0]] + [
            min((best[start][0] + cost(start, end), (*best[start][1], end)) for start in range(end))
            for end in range(1, len(lengths) + 1)
        ]
    return [lengths[end - 1] for end in best[len(lengths)][1]]
