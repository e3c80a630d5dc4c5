"""Benchmark workloads are the same amount of work every time, on other text."""

from __future__ import annotations

from jaxserve.bench.workloads import Job, Text, corpus, mixed_batch, one_stream, shared_prefix, stream_of_chats

WORDS = corpus(lambda words: list(words.encode()))


def text(seed: int) -> Text:
    return Text(WORDS, seed)


def sizes(jobs: tuple[Job, ...]) -> list[tuple[int, int]]:
    return [(len(job.prompt), job.max_tokens) for job in jobs]


def test_a_seed_gives_the_same_prompts_and_another_one_other_text_of_the_same_lengths() -> None:
    assert mixed_batch(text(1)) == mixed_batch(text(1))
    assert mixed_batch(text(1)) != mixed_batch(text(2))
    assert sizes(mixed_batch(text(1))) == sizes(mixed_batch(text(2)))


def test_a_smaller_batch_is_the_beginning_of_the_whole() -> None:
    assert sizes(mixed_batch(text(1), 5)) == sizes(mixed_batch(text(1)))[:5]


def test_lengths_are_within_their_bounds_and_vary() -> None:
    prompts, outputs = zip(*sizes(mixed_batch(text(1))), strict=True)
    assert len(prompts) == 64
    assert min(prompts) >= 16
    assert max(prompts) <= 512
    assert min(outputs) >= 16
    assert max(outputs) <= 256
    assert 64 < sorted(prompts)[32] < 144  # the median of the distribution is 96
    assert sizes((one_stream(text(1)),)) == [(128, 128)]


def test_prompts_share_their_prefix_unless_they_are_cold() -> None:
    work = shared_prefix(text(1))
    prefixes = [job.prompt[:1024] for job in work.burst + work.warm]
    assert len(set(prefixes)) == 1
    assert len({job.prompt for job in work.burst + work.warm}) == len(prefixes)
    assert len({prefixes[0], *(job.prompt[:1024] for job in work.cold)}) == 1 + len(work.cold)
    assert {len(job.prompt) for job in work.burst + work.warm + work.cold} == {1056}
    assert len(work.burst) == 32


def test_chats_arrive_at_random_and_long_prompts_regularly() -> None:
    arrivals = stream_of_chats(text(1), seconds=600, rate=0.4, long_every=5)
    assert [a.at for a in arrivals] == sorted(a.at for a in arrivals)
    long = [a for a in arrivals if a.is_long]
    chats = [a for a in arrivals if not a.is_long]
    assert [a.at for a in long] == [5 * i + 2.5 for i in range(120)]
    assert {len(a.job.prompt) for a in long} == {2000}
    assert 190 < len(chats) < 290
    assert [a.at for a in chats] == [a.at for a in stream_of_chats(text(2), seconds=600) if not a.is_long]
