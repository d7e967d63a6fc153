"""The benchmark's maths, on arrival times whose figures can be worked out by hand."""

from __future__ import annotations

import pytest

from airdecode.engine.bench.figures import (
    Turn,
    common_prefix,
    counted_turns,
    decode_rate,
    first_token,
    gaps,
    percentile,
    row_time,
    summarise,
    time_per_output_token,
)
from airdecode.engine.bench.harness import Run


def run(*arrivals: list[float]) -> Run:
    return Run([[0] * len(row) for row in arrivals], list(arrivals))


def test_c123_time_per_output_token_leaves_out_the_first() -> None:
    assert time_per_output_token([1.0, 1.2, 1.9, 2.5, 3.0]) == pytest.approx(0.5)
    assert time_per_output_token([1.0]) is None


def test_rows_are_averaged_and_single_tokens_have_no_time() -> None:
    assert row_time(run([1.0, 2.0, 3.0], [1.0, 4.0, 7.0])) == pytest.approx(2.0)
    assert row_time(run([1.0], [1.0])) is None
    assert first_token(run([1.0, 2.0], [3.0, 4.0])) == pytest.approx(2.0)


def test_gaps_are_of_each_row() -> None:
    assert gaps(run([1.0, 2.0, 4.0], [0.0, 3.0, 3.5])) == pytest.approx([1.0, 2.0, 3.0, 0.5])


@pytest.mark.parametrize(("percent", "value"), [(99, 99), (50, 50), (100, 100), (0.5, 1), (1, 1), (1.5, 2)])
def test_percentile_is_the_nearest_rank(percent: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == value


def test_percentile_of_nothing_is_none_and_of_one_is_it() -> None:
    assert percentile([], 99) is None
    assert percentile([3.0], 99) == 3.0


def test_decode_rate_of_lockstep_rows_is_rows_over_time_per_token() -> None:
    both = run([1.0, 1.5, 2.0], [1.0, 1.5, 2.0])
    assert decode_rate(both) == pytest.approx(2 / 0.5)


def test_decode_rate_counts_only_while_all_rows_decode() -> None:
    # from 3.0 (the second row's first token) to 4.0 (the first row's last): one token of each row
    assert decode_rate(run([1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0])) == pytest.approx(2.0)
    assert decode_rate(run([1.0, 2.0], [3.0, 4.0])) is None


def test_common_prefix_is_the_mean_over_rows() -> None:
    one = Run([[1, 2, 3], [4, 5, 6]], [])
    assert common_prefix(one, Run([[1, 2, 3], [4, 9, 6]], [])) == pytest.approx((3 + 1) / 2)


def test_disturbed_turns_do_not_count_unless_all_are() -> None:
    quiet, loud = Turn(1, run([0.0, 0.01]), 0.05, True), Turn(2, run([0.0, 0.09]), 0.8, False)
    assert counted_turns([quiet, loud, quiet]) == [quiet, quiet]
    assert counted_turns([loud, quiet, loud]) == [quiet]
    assert counted_turns([loud, loud]) == [loud, loud]


def test_summarise_gives_medians_and_extremes_over_counted_rounds() -> None:
    turns = [Turn(0, run([0.1, 0.1 + step, 0.1 + 2 * step]), 0.0, True) for step in (0.010, 0.030, 0.020)]
    row = summarise("x", "y", turns, None, start_s=1.0, peak_mb=2.0, idle_cores=0.0)
    assert row.tpot_ms is not None and row.ttft_ms is not None and row.tokens_per_s is not None
    assert (row.tpot_ms.median, row.tpot_ms.low, row.tpot_ms.high) == pytest.approx((20.0, 10.0, 30.0))
    assert row.p99_ms == pytest.approx(30.0)
    assert row.ttft_ms.median == pytest.approx(100.0)
    assert row.tokens_per_s.median == pytest.approx(50.0)
    assert row.rounds_ms == pytest.approx([10.0, 30.0, 20.0])
    assert row.same_tokens is None


def test_tokens_are_compared_in_rounds_that_both_ran() -> None:
    def turn(number: int, *tokens: int) -> Turn:
        return Turn(number, Run([list(tokens)], [[0.1] * len(tokens)]), 0.0, True)

    mine, first = [turn(1, 1, 2), turn(4, 5, 6)], [turn(1, 1, 9), turn(2, 5, 6), turn(3, 5, 6)]
    row = summarise("x", "y", mine, first, start_s=1.0, peak_mb=2.0, idle_cores=0.0)
    assert row.same_tokens == 1.0


def test_one_token_has_a_first_token_time_and_nothing_else() -> None:
    row = summarise("x", "y", [Turn(1, run([0.1]), 0.0, True)], None, start_s=1.0, peak_mb=2.0, idle_cores=0.0)
    assert (row.tpot_ms, row.p99_ms, row.tokens_per_s) == (None, None, None)
    assert row.ttft_ms is not None and row.ttft_ms.median == pytest.approx(100.0)
