"""The progress of a drain: what is left, and how long it takes if all goes on as so far."""

import pytest

from kvfs.policy.drain_report import DrainProgress


def test_nothing_is_foretold_before_something_moved() -> None:
    found = DrainProgress(10, 1_000, 5.0).report(7.0)
    assert (found["files_left"], found["bytes_left"], found["left_s"]) == (10, 1_000, None)


def test_the_slower_of_files_and_bytes_counts() -> None:
    progress = DrainProgress(10, 1_000, 0.0)
    progress.gone(500)
    found = progress.report(2.0)
    assert (found["files_left"], found["bytes_left"], found["bytes_moved"]) == (9, 500, 500)
    assert found["bytes_per_s"] == pytest.approx(250)
    assert found["left_s"] == pytest.approx(18)  # nine files, at two seconds each


def test_what_is_counted_anew_replaces_what_was_reckoned() -> None:
    progress = DrainProgress(1, 10, 0.0)
    progress.gone(10)
    assert progress.report(1.0)["left_s"] == 0
    progress.found(3, 30)
    found = progress.report(2.0)
    assert (found["files_left"], found["files_moved"], found["left_s"]) == (3, 1, 6.0)


def test_files_without_content_are_counted_too() -> None:
    progress = DrainProgress(4, 0, 0.0)
    progress.gone(0)
    assert progress.report(1.0)["left_s"] == pytest.approx(3)
