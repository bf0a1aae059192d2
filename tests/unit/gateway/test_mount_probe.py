"""Which kernels keep readers coherent with writes past the page cache."""

import pytest

from gateway.fuse.channel.mode_probe import keeps_coherent, version_of


@pytest.mark.parametrize(
    ("release", "coherent"),
    [
        ("5.15.0-91-generic", False),
        ("6.6.119", False),
        ("6.6.120", True),
        ("6.8.0-90-generic", False),
        ("6.12.63+deb13-amd64", False),
        ("6.12.64+deb13-amd64", True),
        ("6.17.13", False),
        ("6.18.2-arch1-1", False),
        ("6.18.3-arch1-1", True),
        ("6.19-rc1", True),
        ("6.19.0", True),
        ("7.0.1", True),
        ("", False),
    ],
)
def test_kernels(release: str, coherent: bool) -> None:
    assert keeps_coherent(version_of(release)) is coherent
