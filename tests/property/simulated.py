"""A device and an engine loop in plain Python, to try the real scheduler on without a model.

The device keeps a simulated KV memory and a "model" whose next token is a hash of everything that attention would read
through the block table. Two layers make it as strict as a real one: layer 0 stores each token with its position, layer
1 stores for each position a hash of all of layer 0 up to it. So a block that is shared, copied, overwritten or evicted
wrongly changes the tokens that follow, even if it happens to hold the right tokens after another prefix.

A step is executed as on a device: copies first, then per layer all writes, then all reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

from jaxserve.blocks import BlockManager
from jaxserve.config import SchedulerConfig
from jaxserve.outputs import TokenEvent
from jaxserve.plan import DEVICE_TOKEN, NO_DRAFTS, Drafts, RowPlan, StepPlan, StepResult
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import AdmissionRule, Patience, Scheduler, Speculation

__all__ = ["VOCAB", "Device", "Engine", "check_blocks", "make_request", "make_scheduler", "shares", "solo_run"]

VOCAB = 29
_SECONDS_PER_TOKEN = 0.1
_MASK = (1 << 61) - 1


def _layer0(token: int, position: int) -> int:
    return token * 100_003 + position + 1


def _mix(digest: int, entry: int) -> int:
    return (digest * 1_000_003 ^ entry) & _MASK


def _next_token(layer1: Iterable[int], seed: int) -> int:
    return hash((seed, *layer1)) % VOCAB


def _extended(layer1: Sequence[int], token: int) -> list[int]:
    """Layer 1 with the entry of a token behind it."""
    return [*layer1, _mix(layer1[-1], _layer0(token, len(layer1)))]


def make_request(
    id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    fork_of: Request | None = None,
    adapter: bytes | None = None,
    cache_salt: str | None = None,
    priority: int = 0,
    arrived_at: float = 0.0,
) -> Request:
    """A request with defaults that suit tests; ``arrived_at`` then id decide the order of service."""
    return Request(
        id=id,
        prompt=list(prompt),
        params=SamplingParams(max_tokens=max_tokens),
        seed=seed,
        stop_ids=frozenset(stop_ids),
        max_total=len(prompt) + max_tokens,
        fork_of=fork_of,
        adapter=adapter,
        cache_salt=cache_salt,
        priority=priority,
        arrived_at=arrived_at,
    )


def make_scheduler(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    budget: int = 16,
    max_num_seqs: int = 8,
    caching: bool = True,
    admission: Sequence[AdmissionRule] = (),
    speculation: Speculation | None = None,
    patience: Patience | None = None,
    **config: bool | int | str,
) -> Scheduler:
    """A scheduler of a size that suits tests; time never runs out unless ``patience`` says so."""
    return Scheduler(
        SchedulerConfig(**config),  # type: ignore[arg-type]
        BlockManager(num_blocks, block_size, enable_prefix_caching=caching),
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        admission=admission,
        speculation=speculation,
        patience=patience or Patience(max_seconds=1e9),
    )


def shares(plan: StepPlan) -> dict[str, int]:
    """Tokens that each request computes in the step, in the order of the rows."""
    return {row.request_id: row.num_tokens for row in plan.rows}


def solo_run(request: Request) -> list[int]:
    """The output of ``request`` with all memory to itself and no scheduler."""
    tokens = list(request.prompt)
    layer1 = list(accumulate((_layer0(token, at) for at, token in enumerate(tokens)), _mix, initial=_root(request)))[1:]
    output: list[int] = []
    while len(tokens) < request.max_total:
        token = _next_token(layer1, request.seed)
        layer1.append(_mix(layer1[-1], _layer0(token, len(tokens))))
        tokens.append(token)
        output.append(token)
        if token in request.stop_ids:
            break
    return output


def _root(request: Request) -> int:
    # An adapter changes the KV of every position, a salt does not.
    return 7 if request.adapter is None else hash(request.adapter[0])


@dataclass
class Device:
    """Simulated KV memory of ``num_blocks`` blocks, and the state of each row.

    ``roots`` holds per request id what its adapter contributes to layer 1, ``max_drafts`` is how many tokens it guesses
    ahead, ``max_depth`` how many of them may be right at once: all, if they are chains, fewer if they are trees.
    """

    num_blocks: int
    block_size: int
    max_rows: int
    roots: dict[str, int] = field(default_factory=dict)
    sequential_copies: bool = False
    max_drafts: int = 0
    max_depth: int = 0

    def __post_init__(self) -> None:
        self.layer0 = [-1] * (self.num_blocks * self.block_size)
        self.layer1 = [-1] * (self.num_blocks * self.block_size)
        self.owner = [""] * self.max_rows
        self.lengths = [0] * self.max_rows
        self.last_token = [DEVICE_TOKEN] * self.max_rows
        self.drafts = [NO_DRAFTS] * self.max_rows

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one step; asserts what a real device relies on."""
        assert len({row.row for row in plan.rows}) == len(plan.rows)
        assert len({row.request_id for row in plan.rows}) == len(plan.rows)
        self._copy(plan)
        starts = [self._start(row) for row in plan.rows]
        slots = [self._slots(row, start) for row, start in zip(plan.rows, starts, strict=True)]
        written = [slot for start, at in zip(starts, slots, strict=True) for slot in at[start:]]
        assert len(set(written)) == len(written), "two rows write one slot"
        seen = [self._seen(row, start, at) for row, start, at in zip(plan.rows, starts, slots, strict=True)]
        for row, start, at, sees in zip(plan.rows, starts, slots, seen, strict=True):
            for slot, token, before in zip(at[start:], self._tokens(row), sees, strict=True):
                self.layer0[slot] = _layer0(token, len(before) - 1)  # a node's position is its depth
        for row, start, at, sees in zip(plan.rows, starts, slots, seen, strict=True):
            for slot, before in zip(at[start:], sees, strict=True):
                entries = (self.layer0[other] for other in before)
                self.layer1[slot] = list(accumulate(entries, _mix, initial=self.roots[row.request_id]))[-1]
        rows = list(zip(plan.rows, slots, seen, strict=True))
        tokens = tuple(self._sample(row, start, at, sees) for start, (row, at, sees) in zip(starts, rows, strict=True))
        return StepResult(
            tokens=tokens,
            logprobs=(None,) * len(plan.rows),
            drafts=tuple(self._propose(row, at) if plan.proposes else NO_DRAFTS for row, at, _ in rows),
        )

    def _copy(self, plan: StepPlan) -> None:
        targets = [copy.target for copy in plan.copies]
        assert 0 not in targets
        assert len(set(targets)) == len(targets)
        assert all(copy.source != copy.target for copy in plan.copies)
        size = self.block_size
        for layer in (self.layer0, self.layer1):
            before = layer if self.sequential_copies else list(layer)
            for copy in plan.copies:
                layer[copy.target * size : (copy.target + 1) * size] = before[
                    copy.source * size : (copy.source + 1) * size
                ]

    def _start(self, row: RowPlan) -> int:
        """Position of the row's first token; while drafts are in flight, the plan has an upper bound of it."""
        assert len(row.tokens) + row.num_drafts == row.num_tokens
        assert DEVICE_TOKEN not in row.tokens[:-1]
        if row.fresh:
            assert row.tokens == row.history[row.start : row.start + row.num_tokens]
            self.owner[row.row] = row.request_id
            self.drafts[row.row] = NO_DRAFTS
            return row.start
        assert row.history == ()
        assert self.owner[row.row] == row.request_id
        start = self.lengths[row.row]
        assert start == row.start if row.tokens[0] != DEVICE_TOKEN else start <= row.start
        return start

    def _slots(self, row: RowPlan, start: int) -> list[int]:
        """Slot of each position up to the row's last."""
        size = self.block_size
        assert row.num_tokens > 0
        assert 0 not in row.block_ids
        assert len(row.block_ids) * size >= row.start + row.num_tokens, "the block table does not cover the tokens"
        return [row.block_ids[at // size] * size + at % size for at in range(start + row.num_tokens)]

    def _parent(self, row: RowPlan, node: int) -> int:
        """The node that a draft follows; one that is not there follows the newest token."""
        parents = self.drafts[row.row].parents
        return parents[node - 1] if 0 < node <= len(parents) else 0

    def _seen(self, row: RowPlan, start: int, slots: list[int]) -> list[list[int]]:
        """The slots that each token of the row reads: those before it, and of drafts its path only."""
        newest = start + len(row.tokens)
        seen = [slots[: at + 1] for at in range(start, newest)]
        for node in range(1, 1 + row.num_drafts):
            seen.append([*seen[len(row.tokens) - 1 + self._parent(row, node)], slots[newest - 1 + node]])
        return seen

    def _tokens(self, row: RowPlan) -> list[int]:
        """Token ids of the row, and of its drafts (-1 for one that is not there)."""
        drafts = (*self.drafts[row.row].tokens, *[-1] * row.num_drafts)[: row.num_drafts]
        return [*(self.last_token[row.row] if token == DEVICE_TOKEN else token for token in row.tokens), *drafts]

    def _sample(self, row: RowPlan, start: int, slots: list[int], seen: list[list[int]]) -> tuple[int, ...]:
        """What is sampled after the newest token, and after each right draft; the KV of these moves together."""
        self.lengths[row.row] = start + len(row.tokens)
        if not row.samples:
            assert row.num_drafts == 0
            return ()
        tokens, node, drafts = [], 0, self._tokens(row)[len(row.tokens) :]
        sees = seen[len(row.tokens) - 1 :]
        while True:
            tokens.append(_next_token((self.layer1[slot] for slot in sees[node]), row.seed))
            right = [n for n, d in enumerate(drafts, 1) if self._parent(row, n) == node and d == tokens[-1]]
            if not right:
                break
            (node,) = right
        kept = [(self.layer0[slot], self.layer1[slot]) for slot in sees[node]]
        for slot, values in zip(slots, kept, strict=False):
            self.layer0[slot], self.layer1[slot] = values
        self.lengths[row.row] = len(kept)
        self.last_token[row.row] = tokens[-1]
        return tuple(tokens)

    def _propose(self, row: RowPlan, slots: list[int]) -> Drafts:
        """Up to ``max_drafts`` guesses of what follows, some of them wrong; siblings are distinct."""
        if not row.samples or not self.max_drafts:
            return NO_DRAFTS
        layer1 = [self.layer1[slot] for slot in slots[: self.lengths[row.row]]]
        rng = Random(repr((row.request_id, len(layer1))))
        nodes = [_extended(layer1, self.last_token[row.row])]
        guesses: list[int] = []
        parents: list[int] = []
        for _ in range(rng.randint(0, self.max_drafts)):
            deepest = len(layer1) + self.max_depth
            parent = len(guesses)
            if self.max_depth < self.max_drafts:
                parent = rng.choice([node for node, path in enumerate(nodes) if len(path) <= deepest])
            siblings = {token for token, other in zip(guesses, parents, strict=True) if other == parent}
            token = _next_token(nodes[parent], row.seed)
            if token in siblings or rng.random() > 0.7:
                token = rng.choice([other for other in range(VOCAB) if other not in siblings])
            guesses.append(token)
            parents.append(parent)
            nodes.append(_extended(nodes[parent], token))
        self.drafts[row.row] = Drafts(tuple(guesses), tuple(parents))
        return self.drafts[row.row]


class Engine:
    """The step loop around a real scheduler, with or without one step in flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        max_rows: int = 16,
        overlap: bool = True,
        sequential_copies: bool = False,
        max_drafts: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.blocks = scheduler.blocks
        self.device = Device(
            self.blocks.num_blocks,
            self.blocks.block_size,
            max_rows,
            sequential_copies=sequential_copies,
            max_drafts=max_drafts,
            max_depth=scheduler.speculation.max_depth,
        )
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, TokenEvent] = {}
        self.plans: list[StepPlan] = []
        self._overlap = overlap
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished or a step unsettled."""
        return self.scheduler.has_work or bool(self._in_flight)

    def add(self, request: Request) -> None:
        """Submit a request."""
        self.scheduler.add(request)
        self.outputs[request.id] = []
        self.device.roots[request.id] = _root(request)

    def abort(self, request_id: str) -> None:
        """Abort a request, whatever its state."""
        event = self.scheduler.abort(request_id)
        if event is not None:
            assert event.finish is FinishReason.ABORT
            self._receive([event])

    def step(self) -> StepPlan:
        """Plan and dispatch one step, then settle the previous one (or this one, without overlap)."""
        plan = self.scheduler.plan()
        self.plans.append(plan)
        if plan:
            self._in_flight.append((plan, self.device.run(plan)))
        while len(self._in_flight) > (1 if self._overlap and plan else 0):
            settled, result = self._in_flight.popleft()
            if all(len(row.tokens) == 1 for row in settled.rows):
                self.scheduler.speculation.note_step(
                    settled.num_tokens, 1 + _SECONDS_PER_TOKEN * settled.num_tokens, proposes=settled.proposes
                )
            self._receive(self.scheduler.update(settled, result))
        return plan

    def run(self, max_steps: int = 1000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.busy:
                return
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def _receive(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.finished, "an event after the end"
            self.outputs[event.request_id] += event.token_ids
            if event.finish is not None:
                self.finished[event.request_id] = event


def check_blocks(blocks: BlockManager, requests: Iterable[Request]) -> None:
    """Assert that the pool's books agree with the block tables of ``requests``."""
    pool = blocks.pool
    uses = [0] * pool.num_blocks
    uses[0] = 1
    for request in requests:
        for block in request.blocks:
            uses[block] += 1
    free = pool.free_blocks()
    assert list(pool.refs) == uses
    assert [block for block, published in enumerate(pool.state()[1]) if published] == sorted(pool._content)
    assert pool.num_cached == sum(block in pool._content for block in free)
    assert sorted(free) == [block for block in range(1, pool.num_blocks) if not uses[block]]
