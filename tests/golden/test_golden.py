"""How files are held."""

from pathlib import Path

import pytest

from tests.golden import golden


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own, in an environment where nothing is accepted."""
    monkeypatch.setattr(golden, "HERE", tmp_path)
    monkeypatch.delenv("KVFS_TEST_ACCEPT", raising=False)
    monkeypatch.delenv("CI", raising=False)
    return tmp_path


def test_a_change_fails_with_the_difference_and_the_remedy(room: Path) -> None:
    (room / "a.txt").write_text("one\ntwo\n")
    golden.hold("a.txt", ["one", "two"])
    with pytest.raises(pytest.fail.Exception, match=r"-two\n\+three\n.*KVFS_TEST_ACCEPT=1"):
        golden.hold("a.txt", ["one", "three"])
    with pytest.raises(pytest.fail.Exception, match=r"\+one"):
        golden.hold("absent.txt", ["one"])


def test_a_wanted_change_is_accepted(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_TEST_ACCEPT", "1")
    golden.hold("a.txt", ["three"])
    assert (room / "a.txt").read_text() == "three\n"


def test_ci_accepts_nothing(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFS_TEST_ACCEPT", "1")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="nothing is accepted"):
        golden.hold("a.txt", ["three"])
    assert not (room / "a.txt").exists()
