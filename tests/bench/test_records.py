"""Figures of records made by hand."""

from __future__ import annotations

import pytest

from jaxserve.bench.options import MetricOptions
from jaxserve.bench.records import Record, percentile, render, summarise
from jaxserve.errors import ConfigError


def record(started: float, pieces: list[float], num_output: int, error: str | None = None) -> Record:
    finished = pieces[-1] + 0.25 if pieces else started
    return Record(started, pieces, finished, num_prompt=10, num_output=num_output, error=error)


FIRST = record(1.0, [1.5, 1.75, 2.5], 6)
SECOND = record(2.0, [4.0, 4.5], 2)
SINGLE = record(0.0, [0.5], 1)


def test_times_of_one_request() -> None:
    assert (FIRST.ttft, FIRST.tpot, FIRST.itl, FIRST.e2el) == (0.5, 0.2, [0.25, 0.75], 1.75)
    assert (SINGLE.ttft, SINGLE.tpot, SINGLE.itl) == (0.5, None, [])


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    silent = Record(1.0, [], 3.0, num_output=2)
    assert (silent.ttft, silent.tpot, silent.e2el) == (2.0, None, 2.0)


@pytest.mark.parametrize(("share", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_percentiles_lie_between_values(share: float, value: float) -> None:
    assert percentile([4.0, 2.0, 1.0, 3.0], share) == pytest.approx(value)
    assert percentile([], share) == 0.0


def test_a_summary_counts_what_succeeded_and_names_the_first_error() -> None:
    options = MetricOptions(percentile_metrics="ttft,itl,tpot,e2el", metric_percentiles="50,99.9")
    records = [FIRST, record(0.0, [1.0], 5, "broke off"), SECOND, record(0.0, [], 0, "other")]
    summary = summarise(records, 4.0, options)
    assert (summary["completed"], summary["failed"], summary["first_error"]) == (2, 2, "broke off")
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (20, 8)
    assert (summary["request_throughput"], summary["output_throughput"]) == (0.5, 2.0)
    assert summary["total_token_throughput"] == 7.0
    assert (summary["mean_ttft_ms"], summary["p50_ttft_ms"]) == (1250.0, 1250.0)
    assert summary["p99.9_ttft_ms"] == pytest.approx(1998.5)
    assert (summary["mean_itl_ms"], summary["mean_tpot_ms"]) == (500.0, 350.0)
    assert summary["mean_e2el_ms"] == 2250.0
    shown = render("Result", summary, options)
    assert "Failed requests:                                         2" in shown
    assert "P99.9 TTFT (ms):" in shown
    assert shown.endswith("First error: broke off")


def test_goodput_counts_requests_within_all_limits() -> None:
    def goodput(*limits: str) -> float:
        good: float = summarise([FIRST, SECOND, SINGLE], 2.0, MetricOptions(goodput=limits))["request_goodput"]
        return good

    assert goodput("ttft:500") == 1.0
    assert goodput("ttft:499") == 0.0
    assert goodput("ttft:2000", "tpot:200") == 1.0
    assert goodput("e2el:2000") == 1.0
    assert "request_goodput" not in summarise([FIRST], 2.0, MetricOptions())


def test_nothing_but_failures_is_summed_up_too() -> None:
    summary = summarise([record(0.0, [], 0, "no")], 1.0, MetricOptions())
    assert (summary["completed"], summary["mean_ttft_ms"], summary["p99_itl_ms"]) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"percentile_metrics": "ttft,speed"}, "percentile_metrics must be of ttft, tpot, itl, e2el, got 'speed'"),
        ({"metric_percentiles": "50,101"}, "from 0 to 100, got '101'"),
        ({"metric_percentiles": "median"}, "from 0 to 100, got 'median'"),
        ({"goodput": ("itl:5",)}, "goodput must be like ttft:500, of ttft, tpot, e2el, got 'itl:5'"),
        ({"goodput": ("ttft",)}, "got 'ttft'"),
        ({"goodput": ("ttft:-1",)}, "got 'ttft:-1'"),
    ],
)
def test_unusable_metric_options_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MetricOptions(**settings)  # type: ignore[arg-type]
