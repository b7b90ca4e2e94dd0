"""Long prompts, computed part by part: the pages of one part are found in the cache of prefixes by the next.

GenAI fills its steps in the order of arrival, so that a short prompt would wait until the whole of a long one is
computed. Between two parts it gets its turn.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchserve_openvino.generation.text.engine import Sampling
from torchserve_openvino.generation.text.genai.engine_messages import Add
from torchserve_openvino.generation.text.genai.pipeline import PAGE, Pipeline, Running

# --- scheduling of prompts with shared prefixes -------------------------------------------------------------------
# GenAI 2026.4 gives a page that is not full to every prompt that goes on from its tokens, and makes a copy only for a
# sequence that generates already: two prompts that are computed in the same step, or while one of them waits for the
# rest of its steps, write into the same page. Such a page holds an earlier prompt, and the beginning of its answer. So
# prompts that begin with the same earlier prompt, or with one another, are computed one after the other; but for equal
# ones that one step computes as a whole, which write the same.


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
        begins = [digest for digest in hashes if digest in self._known]
        for prefix in begins:
            self._known.move_to_end(prefix)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        self._computed[number] = begins

    def end(self, number: int) -> None:
        """Notes that a prompt has its first token, or is gone; one that is not computed is ignored."""
        self._computed.pop(number, None)

    def clear(self) -> None:
        """Notes that no prompt is computed any more."""
        self._computed.clear()


# --- long prompts, computed part by part: the pages of one part are found in the cache of prefixes by the next ----


_ONE = Sampling(1, ignore_eos=True)
_NOBODY = -1


class Pages:
    """The pages that were computed lately, and so are probably still in the cache.

    Only speed and a metric depend on it: GenAI compares tokens, and computes what it does not find.

    Args:
        most: How many are remembered; 0 without a cache of prefixes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pages: OrderedDict[int, None] = OrderedDict()

    def learn(self, tokens: Sequence[int]) -> None:
        """Remembers the full pages of a sequence."""
        if not self._most:
            return
        for page in _pages_of(tokens):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def tokens_of(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens a prompt has in common with what was computed, in full pages."""
        count = 0
        for page in _pages_of(prompt):
            if page not in self._pages:
                break
            count += PAGE
        return count


def _pages_of(tokens: Sequence[int]) -> Iterator[int]:
    before = 0
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        before = hash((before, tuple(tokens[start : start + PAGE])))
        yield before


@dataclass
class _Part:
    """What the pipeline computes of a long prompt now."""

    running: Running
    end: int
    cancelled: bool = False


class LongPrompts:
    """The prompts that need more than one step, in the order of arrival; the first of them is computed.

    Args:
        pipeline: Gets the parts.
        pages: What was computed lately.
        beginnings: What is computed now.
    """

    def __init__(self, pipeline: Pipeline, pages: Pages, beginnings: SharedPrefixes) -> None:
        self._pipeline, self._pages, self._beginnings = pipeline, pages, beginnings
        settings = pipeline.settings
        # Room for the tokens of others, so that a part and they fit into one step.
        size = (settings.step_tokens - PAGE) // PAGE * PAGE
        self._size = size if settings.prefix_caching else 0
        self._waiting: deque[Add] = deque()
        self._part: _Part | None = None
        # Tokens of the first prompt that were computed.
        self._done = 0
        self._gave_way = False

    def __bool__(self) -> bool:
        return bool(self._waiting) or self._part is not None

    @property
    def size(self) -> int:
        """Tokens of the part that the next step computes; 0 if there is none."""
        return self._size if self._part is not None else 0

    def takes(self, add: Add) -> bool:
        """Takes a prompt that one step can't compute; returns whether it did."""
        most = self._pipeline.settings.step_tokens
        if self._size <= 0 or len(add.prompt) <= most or len(add.prompt) - self._pages.tokens_of(add.prompt) <= most:
            return False
        self._waiting.append(add)
        return True

    def before_step(self, others_wait: bool) -> Add | None:
        """Adds the next part to the pipeline.

        Args:
            others_wait: Whether another prompt has no token yet. It goes first, every other time.

        Returns:
            A prompt that the pipeline is to have as it is: enough of it is computed, or GenAI refuses the part. None
            otherwise.
        """
        if not self._waiting or self._part is not None:
            return None
        if others_wait and not self._gave_way:
            self._gave_way = True
            return None
        self._gave_way = False
        prompt = self._waiting[0].prompt
        end = max(self._done, self._pages.tokens_of(prompt)) + self._size
        if end >= len(prompt):
            return self._next()
        if not self._beginnings.may_begin(hashes := hashes_of(prompt[:end])):
            return None
        try:
            part = self._pipeline.add(_NOBODY, prompt[:end], _ONE, seed=0, eos=frozenset())
        except (RuntimeError, ValueError, TypeError):
            # Whatever it has against the part, it will say of the whole.
            return self._next()
        self._part = _Part(part, end)
        self._beginnings.begin(_NOBODY, hashes)
        return None

    def after_step(self) -> Add | None:
        """Reads what became of the part; returns a prompt that was cancelled, and so is gone now."""
        part = self._part
        if part is None:
            return None
        update = part.running.news()
        if not update.tokens and update.end is None:
            return None
        self._part, self._done = None, part.end
        self._beginnings.end(_NOBODY)
        self._pages.learn(self._waiting[0].prompt[: part.end])
        return self._next() if part.cancelled else None

    def _next(self) -> Add:
        self._done = 0
        return self._waiting.popleft()

    def cancel(self, number: int) -> bool | None:
        """Cancels a prompt.

        Returns:
            Whether it is gone, or will be after a step; None if it is not here.
        """
        for index, add in enumerate(self._waiting):
            if add.number == number:
                if index == 0 and self._part is not None:
                    # A page that is half computed would stay in the cache.
                    self._part.cancelled = True
                    return False
                if index == 0:
                    self._next()
                else:
                    del self._waiting[index]
                return True
        return None

    def clear(self) -> list[Add]:
        """Forgets all prompts, and returns them."""
        if self._part is not None:
            self._part.running.cancel()
        left, self._part, self._done = list(self._waiting), None, 0
        self._waiting.clear()
        return left
