"""The limit of descriptors, under a kernel that grants a raise and under one that does not."""

import resource
from pathlib import Path

import pytest

from kvfs.base import descriptors

SOFT, HARD, MOST = 256, 1024, 1 << 20


class Kernel:
    """Limits of one process. `may_raise`: it has CAP_SYS_RESOURCE."""

    def __init__(self, *, may_raise: bool) -> None:
        self.limits = (SOFT, HARD)
        self._may_raise = may_raise

    def get(self, _which: int) -> tuple[int, int]:
        return self.limits

    def set(self, _which: int, limits: tuple[int, int]) -> None:
        if limits[1] > MOST:
            raise PermissionError(1, "past fs.nr_open, which nobody may")
        if limits[1] > self.limits[1] and not self._may_raise:
            raise ValueError("not allowed to raise maximum limit")
        self.limits = limits


@pytest.mark.parametrize(("may_raise", "reached"), [(True, MOST), (False, HARD)])
def test_the_limit_is_raised_as_far_as_the_system_lets_it(
    *, may_raise: bool, reached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(may_raise=may_raise)
    monkeypatch.setattr(resource, "getrlimit", kernel.get)
    monkeypatch.setattr(resource, "setrlimit", kernel.set)
    monkeypatch.setattr(descriptors, "most_of_system", lambda: MOST)
    assert descriptors.allow_most() == reached
    assert kernel.limits == (reached, reached)


def test_no_process_is_given_more_than_the_kernel_grants_any() -> None:
    granted = int(Path("/proc/sys/fs/nr_open").read_text())
    assert 0 < descriptors.most_of_system() <= min(granted, MOST)
