"""How many drafts are verified, by what they bring and what they cost."""

from __future__ import annotations

from random import Random

from jaxserve.plan import Drafts
from jaxserve.request import Request
from jaxserve.runner.buckets import Buckets
from jaxserve.scheduler import AdaptiveSpeculation
from jaxserve.scheduler.adaptive import StepCosts
from tests.property.simulated import make_request

MOST = 4


def chain(*tokens: int) -> Drafts:
    return Drafts(tokens, tuple(range(len(tokens))))


def policy(cost_of_a_token: float, rows: int = 1) -> AdaptiveSpeculation:
    """One whose steps are known to cost 1 s, and so much more for each token beyond the rows."""
    speculation = AdaptiveSpeculation(MOST, pad=lambda tokens, rows: tokens, max_tokens=10**6)
    for extra in range(rows * MOST + 1):
        speculation.note_step(rows + extra, 1 + cost_of_a_token * extra, proposes=True)
    return started(speculation)


def started(speculation: AdaptiveSpeculation) -> AdaptiveSpeculation:
    """After the first steps, in which nothing is proposed."""
    assert not speculation.proposes
    while not speculation.proposes:
        assert speculation.choose([], 0) == {}
    return speculation


def live(speculation: AdaptiveSpeculation, request: Request, chance: float, steps: int, rng: Random) -> list[int]:
    """Play a request whose drafts are right with a chance each; the numbers of drafts that were chosen."""
    chosen = []
    for _ in range(steps):
        wanted = speculation.choose([request] if request.drafts.tokens else [], 0).get(request.id, 0)
        chosen.append(wanted)
        tokens = []
        for draft in request.drafts.tokens[:wanted]:
            if rng.random() >= chance:
                break
            tokens.append(draft)
        # What comes after the verified ones follows the drafts that were not verified as often.
        drafts = request.drafts.tokens
        follows = len(tokens) == wanted < len(drafts) and rng.random() < chance
        tokens.append(drafts[len(tokens)] if follows else -5)
        proposed = chain(*(rng.randrange(100) for _ in range(MOST))) if speculation.proposes else Drafts()
        speculation.note(request, wanted, tuple(tokens), proposed)
        request.drafts = proposed
    return chosen


def test_no_step_is_larger_than_there_can_be() -> None:
    """Drafts of all requests together can be more than fit into a step."""
    buckets = Buckets(max_tokens=8, max_rows=4, num_drafts=MOST)
    pad = lambda tokens, rows: buckets.pick(tokens, rows, has_prefill=False).tokens  # noqa: E731
    speculation = started(AdaptiveSpeculation(MOST, pad=pad, max_tokens=buckets.max_places))
    requests = [make_request(name, [1]) for name in "abcd"]
    for _ in range(20):
        for request in requests:
            request.drafts = chain(*range(MOST))
            speculation.note(request, 0, request.drafts.tokens, request.drafts)
    assert sum(speculation.choose(requests, 0).values()) == 8 - len(requests)


def test_right_drafts_that_cost_little_are_all_verified() -> None:
    chosen = live(policy(0.05), make_request("a", [1]), 0.95, 60, Random(1))
    assert sum(chosen[-20:]) / 20 > 0.8 * MOST


def test_wrong_drafts_are_given_up_and_tried_again_after_longer_and_longer_pauses() -> None:
    speculation = policy(0.05)
    chosen = live(speculation, make_request("a", [1]), 0.0, 400, Random(1))
    assert sum(chosen[:20]) > 0
    assert sum(chosen[100:]) <= 4
    assert 3 <= speculation.stats.disabled["no gain"] <= 6


def test_speculation_comes_back_when_drafts_are_right_again() -> None:
    speculation, request = policy(0.05), make_request("a", [1])
    live(speculation, request, 0.0, 60, Random(1))
    chosen = live(speculation, request, 1.0, 200, Random(2))
    assert sum(chosen[-10:]) == 10 * MOST


def test_what_drafts_cost_limits_them() -> None:
    dear = live(policy(0.5), make_request("a", [1]), 0.7, 80, Random(1))
    cheap = live(policy(0.02), make_request("a", [1]), 0.7, 80, Random(1))
    assert sum(dear[20:]) < sum(cheap[20:])
    assert max(live(policy(1.0), make_request("a", [1]), 0.9, 80, Random(1))[20:]) == 0


def test_what_proposals_cost_counts() -> None:
    """Drafts that pay once they are there, but not for the time that it takes to make them."""
    speculation = policy(0.1)
    live(speculation, make_request("a", [1]), 0.5, 60, Random(1))
    assert not speculation.stats.disabled
    for _ in range(20):
        speculation.note_step(1, 0.6, proposes=False)
    live(speculation, make_request("b", [1]), 0.5, 60, Random(1))
    assert speculation.stats.disabled["no gain"] >= 1


def test_drafts_go_to_the_request_whose_are_right() -> None:
    speculation = policy(0.3, rows=2)
    good, bad = make_request("good", [1]), make_request("bad", [1])
    for _ in range(40):
        for request, right in ((good, True), (bad, False)):
            request.drafts = chain(1, 2, 3, 4)
            speculation.note(request, 0, (1, 2, 3, 4) if right else (9,), request.drafts)
    chosen = speculation.choose([good, bad], 0)
    assert chosen.get("good", 0) >= 2
    assert "bad" not in chosen


def test_of_a_tree_the_drafts_up_to_the_likely_path_are_taken() -> None:
    """Siblings 1 and 2 of the root and 3 and 4 after the second of them: the second is right, and so is the third."""
    speculation, request = policy(0.2), make_request("a", [1])
    request.drafts = Drafts((10, 11, 12, 13), (0, 0, 2, 2))
    for _ in range(40):
        speculation.note(request, 0, (11, 12), request.drafts)
    right = speculation._tracks["a"].chances.right
    assert [round(chance) for chance in right] == [0, 1, 1, 0]
    speculation.note(request, 0, (10,), request.drafts)
    assert speculation._tracks["a"].chances.right[2] == right[2], "nothing is learned of drafts whose parent is wrong"
    request.pending = 1  # the next tree is in the making: it is taken to be like this one
    assert speculation._gains(request)[1] == speculation._gains(request)[0], "the second comes only with the first"


def test_others_in_the_step_count() -> None:
    """Beside many rows without drafts, a token more costs as much but brings the same."""
    speculation = AdaptiveSpeculation(MOST, pad=lambda tokens, rows: tokens, max_tokens=10**6)
    for size in range(1, 64):
        speculation.note_step(size, 0.2 + size, proposes=True)
    started(speculation)
    request = make_request("a", [1])
    request.drafts = chain(1, 2, 3, 4)
    assert speculation.choose([request], 20) == {}


def test_costs_lie_between_their_neighbours_and_never_fall() -> None:
    costs = StepCosts()
    assert costs.seconds(7) == 1.0
    for seconds in (2.0, 3.0, 100.0):
        costs.note(4, seconds)
    costs.note(8, 5.0)
    costs.note(16, 4.0)
    assert [costs.seconds(size) for size in (1, 4, 6, 8, 12, 16, 99)] == [3, 3, 4, 5, 5, 5, 5]


def test_what_is_known_of_a_request_goes_with_it() -> None:
    speculation = policy(0.05)
    request = make_request("a", [1])
    live(speculation, request, 1.0, 5, Random(1))
    speculation.forget(request)
    speculation.forget(request)
    assert not speculation._tracks
