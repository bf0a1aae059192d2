"""What a reader is expected to want next."""

from kvfs.policy.readahead import WINDOW_BYTES, Readahead

MIB = 1 << 20


def test_one_that_goes_on_wants_what_follows() -> None:
    reader = Readahead()
    assert reader.ahead(0, MIB) == [(MIB, WINDOW_BYTES)]
    assert reader.ahead(MIB, MIB) == [(2 * MIB, WINDOW_BYTES)]


def test_the_kernel_may_change_the_order_of_its_readahead() -> None:
    reader = Readahead()
    reader.ahead(0, MIB)
    assert reader.ahead(3 * MIB, MIB) == [(4 * MIB, WINDOW_BYTES)]
    assert reader.ahead(2 * MIB, MIB) == [(4 * MIB, WINDOW_BYTES)]
    assert reader.ahead(4 * MIB, MIB) == [(5 * MIB, WINDOW_BYTES)]


def test_one_that_begins_elsewhere_goes_on_from_there() -> None:
    reader = Readahead()
    assert reader.ahead(900 * MIB, MIB) == []
    assert reader.ahead(901 * MIB, MIB) == [(902 * MIB, WINDOW_BYTES)]


def test_equal_steps_go_on_in_either_direction() -> None:
    reader = Readahead()
    reader.ahead(100 * MIB, MIB)
    assert reader.ahead(150 * MIB, MIB) == []
    assert reader.ahead(200 * MIB, MIB)[:2] == [(250 * MIB, MIB), (300 * MIB, MIB)]
    back = Readahead()
    for at in (400, 300):
        back.ahead(at * MIB, MIB)
    assert back.ahead(200 * MIB, MIB) == [(100 * MIB, MIB), (0, MIB)]


def test_of_one_that_jumps_about_nothing_is_known() -> None:
    reader = Readahead()
    assert [reader.ahead(at * MIB, MIB) for at in (50, 900, 300, 700)] == [[]] * 4
