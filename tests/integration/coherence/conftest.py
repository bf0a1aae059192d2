"""The two nodes whose namespaces change while they are used."""

from collections.abc import Iterator

import pytest

from tests.integration.several import Several, several


@pytest.fixture(scope="module")
def cluster() -> Iterator[Several]:
    with several(2) as cluster:
        yield cluster
