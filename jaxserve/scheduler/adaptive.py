"""As many drafts as pay: chosen from how often they are right and from what steps of each size cost.

Drafts are worth their expected number of right ones: for each the product of the chances on its path, itself included.
They cost what the step takes longer. Of all drafts of a step's requests, the most promising are taken for as long as
tokens per second rise (the goodput of Liu et al. 2024, arXiv:2406.14066, per draft instead of per batch).

Both sides are measured. Making drafts takes time too, so steps that make some are timed apart from those that do not,
and what the former promise at best is compared with the latter. A request's drafts are compared with the tokens that
came, whether they were verified or not, so that chances are known without a trial: that of a draft, by its number, to
be right if its parent is. Nobody knows them at first, and they are taken to be low: to verify wrong drafts costs more
than to wait for right ones. Where the next tree is still in the making, it is taken to have the shape of the one
before. Times are medians by padded size; sizes that were not seen lie on the line between their neighbours, and above
the largest they are taken to cost what that does, which is soon corrected.

Where it does not pay over a while, nobody proposes any more, and it is tried again after 16 steps, then 32, up to
1024.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

from jaxserve.logging import get_logger
from jaxserve.plan import NO_DRAFTS, Drafts
from jaxserve.request import Request
from jaxserve.scheduler.speculation import NoSpeculation

__all__ = ["AdaptiveSpeculation", "StepCosts"]

_log = get_logger(__name__)

_WEIGHT = 0.15
"""Share of the newest observation in a chance."""

_MARGIN = 1.08
"""How many times the tokens per second of less speculation those of more must promise."""

_SAMPLES = 15  # of which a time is the median
_UNKNOWN = 0.2  # a chance that nothing is known of
_PROBE = 12  # steps with proposals before it is decided whether they are worth it
_FIRST_PAUSE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 4, 16, 1024  # steps without


class StepCosts:
    """What steps of a size take, by measurement."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}
        self._sizes: list[int] = []
        self._medians: list[float] = []

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of ``num_tokens`` padded tokens took so long."""
        newest = self._seconds.setdefault(num_tokens, deque(maxlen=_SAMPLES))
        newest.append(seconds)
        self._typical[num_tokens] = median(newest)
        self._sizes = sorted(self._typical)
        # A larger step is never cheaper: where it seems so, it is noise.
        self._medians = list(accumulate((self._typical[size] for size in self._sizes), max))

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self._sizes)

    def seconds(self, num_tokens: int) -> float:
        """Estimate for a step of ``num_tokens``; 1.0 while nothing is known."""
        at = bisect_left(self._sizes, num_tokens)
        if not self._sizes:
            return 1.0
        if at == len(self._sizes) or at == 0:
            return self._medians[min(at, len(self._sizes) - 1)]
        left, right = self._sizes[at - 1], self._sizes[at]
        share = (num_tokens - left) / (right - left)
        return self._medians[at - 1] * (1 - share) + self._medians[at] * share


@dataclass(slots=True)
class _Chances:
    """How often drafts are right.

    Attributes:
        right: by number the chance of a draft whose parent is right.
        there: chance that there are drafts at all, by whether there were some before.
    """

    right: list[float]
    there: dict[bool, float] = field(default_factory=lambda: {False: _UNKNOWN, True: 0.9})

    def copy(self) -> _Chances:
        return _Chances(list(self.right), dict(self.there))

    def note_children(self, children: Iterable[int], right: int) -> None:
        """The parent of these drafts was right, and of them the one numbered ``right``; they count from 1."""
        for node in children:
            self.right[node - 1] += _WEIGHT * ((node == right) - self.right[node - 1])

    def note_presence(self, before: bool, now: bool) -> None:
        self.there[before] += _WEIGHT * (now - self.there[before])


@dataclass(slots=True)
class _Track:
    """What is known of one request.

    Attributes:
        chances: its own.
        trial: the drafts that are being compared with what comes; none between two trials.
        node: the last of these that was right.
        parents: of the newest drafts that there were.
        had_drafts: whether that was the last time.
    """

    chances: _Chances
    parents: tuple[int, ...]
    trial: Drafts = NO_DRAFTS
    node: int = 0
    had_drafts: bool = False


class AdaptiveSpeculation(NoSpeculation):
    """Drafts that pay.

    Args:
        num_drafts: most per request and step.
        pad: the padded size of a step of so many tokens and rows.
        max_tokens: most tokens of a step.
        lookahead, max_depth: see ``Speculation``; without a depth, drafts are chains.
    """

    def __init__(
        self,
        num_drafts: int,
        pad: Callable[[int, int], int],
        max_tokens: int,
        lookahead: int = 0,
        max_depth: int | None = None,
    ) -> None:
        super().__init__(num_drafts if max_depth is None else max_depth, lookahead)
        self._num_drafts = num_drafts
        self._pad = pad
        self._max_tokens = max_tokens
        self._costs = {proposes: StepCosts() for proposes in (False, True)}
        self._tracks: dict[str, _Track] = {}
        self._prior = _Chances([_UNKNOWN] * num_drafts)
        self._parents = tuple(range(num_drafts))  # of the newest drafts of anybody
        self._gain = _MARGIN  # tokens per second, over the last steps, in units of those without proposals
        self._probed = 0  # steps since the last pause
        self._pause = _FIRST_PAUSE  # for something to compare with
        self._next_pause = _SHORTEST_PAUSE

    @property
    def proposes(self) -> bool:
        """Whether drafts are to be made."""
        return self._pause == 0

    def choose(self, requests: Sequence[Request], num_others: int) -> Mapping[str, int]:
        """Number of drafts of each request that pays."""
        if self._pause:
            self._pause -= 1
            return {}
        if not requests:
            return {}
        chosen, gain = self._best(requests, len(requests) + num_others)
        self._gain += _WEIGHT * (gain - self._gain)
        self._probed += 1
        if self._probed < _PROBE:
            return chosen
        if self._gain < _MARGIN:
            self._rest()
        else:
            self._next_pause = _SHORTEST_PAUSE
        return chosen

    def note(self, request: Request, num_drafts: int, tokens: tuple[int, ...], proposed: Drafts) -> None:
        """Compare the request's drafts with its tokens, whether these drafts were verified or not."""
        super().note(request, num_drafts, tokens, proposed)
        track = self._tracks.get(request.id)
        if track is None:
            track = self._tracks[request.id] = _Track(self._prior.copy(), self._parents)
        for token in tokens:
            self._compare(track, token)
        if not _children(track.trial, track.node):
            track.trial, track.node = proposed, 0
        has_drafts = bool(proposed.tokens)
        if has_drafts:
            self._parents = track.parents = proposed.parents
        for chances in (track.chances, self._prior):
            chances.note_presence(track.had_drafts, has_drafts)
        track.had_drafts = has_drafts

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._tracks.pop(request.id, None)

    def note_step(self, num_tokens: int, seconds: float, *, proposes: bool) -> None:
        """A step without prompt chunks, of ``num_tokens`` padded tokens, took so long, making drafts or not."""
        self._costs[proposes].note(num_tokens, seconds)

    def _compare(self, track: _Track, token: int) -> None:
        """A token came: it is one of the drafts after those that were right, or ends the trial."""
        children = _children(track.trial, track.node)
        right = next((node for node in children if track.trial.tokens[node - 1] == token), 0)
        for chances in (track.chances, self._prior):
            chances.note_children(children, right)
        track.node = right
        if not right:
            track.trial = NO_DRAFTS

    def _rest(self) -> None:
        _log.info("speculation pauses for %d steps: drafts do not pay", self._next_pause)
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        self._probed, self._gain = 0, _MARGIN
        self.stats.note_disabled("no gain")
        for track in self._tracks.values():  # what is proposed after the pause follows other tokens
            track.trial, track.node = NO_DRAFTS, 0

    def _best(self, requests: Sequence[Request], num_rows: int) -> tuple[dict[str, int], float]:
        """The drafts with the most expected tokens per second, and how many times as many that is as without proposals.

        None are taken that promise no more than none.
        """
        gains = sorted(
            ((gain, request.id) for request in requests for gain in self._gains(request)), key=lambda item: -item[0]
        )
        expected = float(num_rows)
        least = expected / self._cost(num_rows, num_rows)
        best_speed, best = _MARGIN * least, 0
        for count, (gain, _) in enumerate(gains[: max(0, self._max_tokens - num_rows)], start=1):
            expected += gain
            speed = expected / self._cost(num_rows + count, num_rows)
            if speed > best_speed:
                best_speed, best = speed, count
        chosen: dict[str, int] = {}
        for _, request_id in gains[:best]:
            chosen[request_id] = chosen.get(request_id, 0) + 1
        plain = num_rows / self._cost(num_rows, num_rows, proposes=False)
        return chosen, (best_speed if best else least) / plain

    def _cost(self, num_tokens: int, num_rows: int, *, proposes: bool = True) -> float:
        """What a step takes; where none of its kind was timed, what one of the other does."""
        costs = self._costs[proposes] or self._costs[not proposes]
        return costs.seconds(self._pad(num_tokens, num_rows))

    def _gains(self, request: Request) -> list[float]:
        """Chance of each draft to be right together with its path, but none more than those before it.

        For it cannot be verified without them.
        """
        track = self._tracks.get(request.id)
        chances = track.chances if track else self._prior
        if request.pending:
            there = chances.there[bool(track and track.had_drafts)]
            parents = track.parents if track else self._parents
        else:
            there, parents = 1.0, request.drafts.parents
        gains = [there]
        for right, parent in zip(chances.right, parents, strict=False):
            gains.append(right * gains[parent])
        return list(accumulate(gains[1:], min))


def _children(drafts: Drafts, node: int) -> list[int]:
    """The drafts that follow a node; they count from 1."""
    return [child for child, parent in enumerate(drafts.parents, start=1) if parent == node]
