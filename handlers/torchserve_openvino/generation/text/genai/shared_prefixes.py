"""Which prompts must not be computed at the same time, where pages of the cache are shared.

GenAI 2026.4 gives a page that is not full to every prompt that goes on from its tokens, and makes a copy only for a
sequence that generates already: two prompts that are computed in the same step, or while one of them waits for the rest
of its steps, write into the same page. Such a page holds an earlier prompt, and the beginning of its answer. So prompts
that begin with the same earlier prompt, or with one another, are computed one after the other; but for equal ones that
one step computes as a whole, which write the same.
"""

from collections import OrderedDict
from collections.abc import Sequence

# Of the prompts that are remembered for each page: several may have the same answer, and so share pages.
_PER_PAGE = 32


def hashes_of(prompt: Sequence[int]) -> list[int]:
    """Returns a hash of each beginning of a prompt, the shortest first."""
    before, hashes = 0, []
    for token in prompt:
        before = hash((before, token))
        hashes.append(before)
    return hashes


class SharedPrefixes:
    """The prompts that may be in the cache, and those that are computed now.

    Args:
        pages: Pages of the cache; 0 if they are not shared, and nothing needs to wait.
    """

    def __init__(self, pages: int) -> None:
        self._most = pages * _PER_PAGE
        self._known: OrderedDict[int, None] = OrderedDict()
        # The known prompts with which those begin that are computed now, the shortest first; the last is the prompt.
        self._computed: dict[int, list[int]] = {}

    def may_begin(self, hashes: Sequence[int], *, fits: bool = False) -> bool:
        """Returns whether a prompt can be computed beside those that are computed now.

        Args:
            hashes: Of its beginnings.
            fits: Whether the next step computes it, and those before it, as a whole.
        """
        if not self._computed:
            return True
        own = set(hashes)
        return all(own.isdisjoint(begins) or (fits and begins[-1] == hashes[-1]) for begins in self._computed.values())

    def begin(self, number: int, hashes: Sequence[int]) -> None:
        """Notes that a prompt is computed from the next step on.

        Args:
            number: No other prompt that is computed now has it.
            hashes: Of its beginnings.
        """
        if not self._most:
            return
        self._known[hashes[-1]] = None
        begins = [each for each in hashes if each in self._known]
        for each in begins:
            self._known.move_to_end(each)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        self._computed[number] = begins

    def end(self, number: int) -> None:
        """Notes that a prompt has its first token, or is gone; one that is not computed is ignored."""
        self._computed.pop(number, None)

    def clear(self) -> None:
        """Notes that no prompt is computed any more."""
        self._computed.clear()
