"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxserve.engine.planning import Plan
from jaxserve.sizing import Mix

__all__ = ["show", "size_of"]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size_of(num_bytes: float) -> str:
    """Bytes in the unit that suits them."""
    power = 0
    while abs(num_bytes) >= 1024 and power < len(_UNITS) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:.0f} {_UNITS[power]}" if power == 0 else f"{num_bytes:.2f} {_UNITS[power]}"


def show(plan: Plan, console: Console | None = None) -> None:
    """Print memory, sessions and times, then what is wrong and what to do."""
    console = console or Console(width=120)
    memory = plan.memory
    console.print(
        f"{plan.model} on {plan.device}: {plan.dtype}, quantization {plan.quantization}, blocks of {plan.block_size}, "
        f"{plan.max_num_seqs} sequences and {plan.max_num_batched_tokens} tokens a step",
        markup=False,
    )
    table = Table(title="memory", title_justify="left")
    for name in ("", "size", "which"):
        table.add_column(name, justify="right" if name == "size" else "left")
    for name, num_bytes, why in _memory_rows(plan):
        table.add_row(name, size_of(num_bytes), escape(why))
    console.print(table)
    served = f"; max_model_len {memory.max_model_len:,}, {memory.largest_max_model_len:,} for one sequence alone"
    line = f"{size_of(memory.token_bytes)} of KV per token{served if memory.max_model_len else ''}"
    console.print(line, markup=False, highlight=False)
    if memory.kv is not None:
        console.print(_sessions_table(plan))
    for line in _lines(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _memory_rows(plan: Plan) -> Iterator[tuple[str, int, str]]:
    memory = plan.memory
    yield "device", memory.memory.total, ""
    yield "… that can be used", memory.memory.limit, memory.memory.reason
    yield "weights", sum(memory.weights.values()), _by_kind(memory.weights)
    if memory.draft_weights:
        yield "weights of drafts", sum(memory.draft_weights.values()), _by_kind(memory.draft_weights)
    if plan.max_loras:
        each = memory.adapters // plan.max_loras
        yield "adapters", memory.adapters, f"{plan.max_loras} slots of {size_of(each)}"
    if memory.kv is not None:
        yield "KV", memory.kv.num_bytes, f"{memory.kv.num_blocks:,} blocks, by {memory.kv.reason}"
    yield "rows", memory.rows + memory.drafts + memory.masks, f"state of {plan.max_num_seqs} sequences between steps"
    yield "left", memory.left, ""
    work = memory.workspace
    yield (
        "… of it scratch, at most",
        work.num_bytes,
        f"{size_of(work.forward)} for a forward pass, {size_of(work.sampling)} for sampling",
    )


def _by_kind(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {size_of(num_bytes)}" for kind, num_bytes in sizes.items())


def _sessions_table(plan: Plan) -> Table:
    table = Table(title="sessions that fit at once", title_justify="left")
    names = ["tokens", "KV", "in blocks", "wasted", "contiguous", "wasted", "ratio"]
    for name in names if plan.bounds is None else [*names, "step of", "at least", "tokens/s, at most"]:
        table.add_column(name, justify="right")
    for index, mix in enumerate(plan.sessions):
        paged, whole = mix.paged, mix.contiguous
        ratio = f"{paged.sessions / whole.sessions:.1f}" if whole.sessions else "–"
        table.add_row(
            _name(mix),
            size_of(mix.kv_bytes),
            f"{paged.sessions:,}",
            f"{paged.wasted:.1%}",
            f"{whole.sessions:,}",
            f"{whole.wasted:.1%}",
            ratio,
            *_step(plan, index),
        )
    return table


def _step(plan: Plan, index: int) -> tuple[str, ...]:
    if plan.bounds is None:
        return ()
    bound = plan.bounds.decodes[index]
    return f"{bound.sessions:,}", f"{1e3 * bound.seconds:.2f} ms", f"{bound.tokens_per_second:,.0f}"


def _name(mix: Mix) -> str:
    return f"{mix.contexts[0]:,}" if len(mix.contexts) == 1 else f"mix, {mix.mean:,.0f}"


def _lines(plan: Plan) -> Iterator[str]:
    if plan.wanted is not None and plan.sessions:
        needed = plan.wanted * plan.sessions[-1].kv_bytes
        mean = plan.sessions[-1].mean
        yield f"{plan.wanted:,} sessions of {mean:,.0f} tokens have {size_of(needed)} of KV"
    if (bounds := plan.bounds) is not None:
        by = "memory" if bounds.decodes[-1].is_memory_bound else "operations"
        yield (
            f"least times on {bounds.chip}, bound by {by}; {bounds.prompt_tokens:,} tokens of a "
            f"prompt take {1e3 * bounds.prompt_seconds:.2f} ms"
        )
    for problem in plan.problems:
        yield f"NO: {problem}"
    for other in plan.alternatives:
        yield f"  {'fits' if other.fits else 'does not fit'}: {other.what} ({size_of(other.num_bytes)} held)"
    for suggestion in plan.suggestions:
        yield f"suggested: {suggestion.flag}  ({suggestion.why})"
