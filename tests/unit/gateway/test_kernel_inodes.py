import pytest

from gateway.fuse.files.kernel_inodes import KernelInodes, Outdated, ino_of
from gateway.fuse.files.open_file import OpenFile
from kvfs.base.errors import Stale
from kvfs.meta.records import Inode, namespace_of

_INO = 3 << 48 | 5
_THREAD = 100


class Kernel:
    """What one has open."""

    def __init__(self) -> None:
        self.opened: list[OpenFile] = []
        self.has_dropped = False
        """Whether its last open took pages of another content away."""
        self.inodes = KernelInodes(lambda file: file in self.opened)

    def open(self, ino: int = _INO) -> OpenFile:
        record = Inode(
            mode=0o100644,
            uid=0,
            gid=0,
            nlink=1,
            atime_ns=0,
            mtime_ns=0,
            ctime_ns=0,
            parent=1,
            name=b"",
        )
        file = OpenFile(ino, 0, -1, False, record)
        self.has_dropped = self.inodes.opens(_THREAD, self.inodes.number(ino), file)
        self.opened.append(file)
        return file


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_a_file_has_its_own_number(kernel: Kernel) -> None:
    kernel.open()
    assert kernel.inodes.numbers(_INO) == [_INO]
    assert kernel.inodes.content(_INO) is None


def test_what_follows_a_content_that_is_open_has_another_number(kernel: Kernel) -> None:
    inodes, contents, numbers = kernel.inodes, [], [_INO]
    for _ in range(5):
        contents.append(kernel.open())
        inodes.part(contents[-1])
        numbers.append(inodes.number(_INO))
        inodes.looked_up(numbers[-1])
    assert len(set(numbers)) == 6
    assert {ino_of(each) for each in numbers} == {_INO}
    assert {namespace_of(each) for each in numbers} == {3}
    assert [inodes.content(each) for each in numbers] == [*contents, None]
    assert sorted(inodes.numbers(_INO)) == sorted(numbers)
    assert inodes.numbers(_INO)[0] == numbers[-1]


def test_what_nobody_has_open_keeps_its_number(kernel: Kernel) -> None:
    file = kernel.open()
    kernel.opened.clear()
    kernel.inodes.part(file)
    assert kernel.inodes.number(_INO) == _INO


def test_the_own_number_is_the_present_one_again_once_the_other_is_forgotten(
    kernel: Kernel,
) -> None:
    inodes, former = kernel.inodes, kernel.open()
    inodes.part(former)
    other = inodes.number(_INO)
    inodes.looked_up(other)
    inodes.looked_up(other)
    kernel.opened.clear()
    inodes.forgotten(other, 1)
    assert inodes.number(_INO) == other
    inodes.forgotten(other, 1)
    assert inodes.number(_INO) == _INO
    # The kernel may have kept pages of the former content.
    kernel.open()
    assert kernel.has_dropped
    kernel.open()
    assert not kernel.has_dropped


def test_it_is_not_while_a_former_content_is_open_by_it(kernel: Kernel) -> None:
    inodes = kernel.inodes
    inodes.part(kernel.open())
    other = inodes.number(_INO)
    inodes.looked_up(other)
    inodes.forgotten(other, 1)
    assert inodes.number(_INO) == other


def test_an_inode_of_a_former_content_is_opened_for_nothing_else(kernel: Kernel) -> None:
    inodes, former = kernel.inodes, kernel.open()
    inodes.part(former)
    newest = kernel.open()
    with pytest.raises(Stale):
        inodes.opens(_THREAD, _INO, newest)
    kernel.opened.remove(former)
    assert inodes.opens(_THREAD, _INO, newest) is True
    assert inodes.content(_INO) is newest


def test_a_former_content_that_is_renewed_is_the_present_one_again(kernel: Kernel) -> None:
    inodes, former = kernel.inodes, kernel.open()
    inodes.part(former)
    inodes.rejoin(former)
    assert inodes.numbers(_INO) == [_INO]
    inodes.part(former)
    assert inodes.content(_INO) is former


def test_a_thread_is_told_to_look_again_until_it_opens_the_same_inode(kernel: Kernel) -> None:
    inodes = kernel.inodes
    assert inodes.outdated(_THREAD, _INO) is Outdated.LOOK_UP
    assert inodes.outdated(_THREAD + 1, _INO) is Outdated.LOOK_UP
    assert inodes.outdated(_THREAD, _INO) is Outdated.RENEW
    kernel.open()
    assert inodes.outdated(_THREAD, _INO) is Outdated.LOOK_UP


def test_what_its_look_up_leads_to_is_taken(kernel: Kernel) -> None:
    inodes = kernel.inodes
    inodes.part(kernel.open())
    assert inodes.outdated(_THREAD, _INO) is Outdated.LOOK_UP
    assert inodes.outdated(_THREAD, _INO + 1) is Outdated.LOOK_UP
    assert inodes.outdated(_THREAD, _INO) is Outdated.LOOK_UP
    assert inodes.outdated(_THREAD, inodes.number(_INO)) is Outdated.TAKE


def test_numbers_are_used_again(kernel: Kernel) -> None:
    inodes = kernel.inodes
    for _ in range(1000):
        former = kernel.open()
        assert inodes.can_part(former)
        inodes.part(former)
        kernel.opened.clear()
        inodes.looked_up(inodes.number(_INO))
        inodes.forgotten(inodes.number(_INO), 1)
    inodes.forget(_INO)
    assert inodes.numbers(_INO) == [_INO]


def test_numbers_are_used_again_where_there_is_always_a_former_content_open(
    kernel: Kernel,
) -> None:
    inodes, former = kernel.inodes, kernel.open()
    for _ in range(1000):
        assert inodes.can_part(former)
        number = inodes.number(_INO)
        inodes.part(former)
        inodes.looked_up(inodes.number(_INO))
        newest = kernel.open()
        kernel.opened.remove(former)
        inodes.closed(former)
        inodes.forgotten(number, 1)
        former = newest


def test_nothing_is_kept_of_what_is_closed_and_forgotten(kernel: Kernel) -> None:
    inodes, contents = kernel.inodes, [kernel.open()]
    empty = vars(KernelInodes(lambda _: False))
    for _ in range(5):
        inodes.part(contents[-1])
        inodes.looked_up(inodes.number(_INO))
        contents.append(kernel.open())
    known = inodes.numbers(_INO)
    kernel.opened.clear()
    for content in contents:
        inodes.closed(content)
    for number in known:
        inodes.forgotten(number, 1)
    inodes.forget(_INO)
    kept = {name: value for name, value in vars(inodes).items() if name != "_holds"}
    assert kept == {name: empty[name] for name in kept}


def test_there_is_an_end_to_them(kernel: Kernel) -> None:
    inodes = kernel.inodes
    while inodes.can_part(kernel.open()):
        inodes.part(kernel.opened[-1])
    assert len(inodes.numbers(_INO)) == 129
    assert not KernelInodes(lambda _: True).can_part(kernel.open(1 << 40))


def test_a_kernel_that_goes_on_has_each_content_by_the_number_by_which_it_opened_it(
    kernel: Kernel,
) -> None:
    """Another kernel of the node has the newest open, so that it is no present one here."""
    former = kernel.open()
    kernel.inodes.part(former)
    former.is_former = True
    newer = kernel.open()
    number = kernel.inodes.number(_INO)

    kernel.inodes = KernelInodes(lambda file: file in kernel.opened)
    kernel.inodes.go_on({_INO: former, number: newer})
    assert kernel.inodes.numbers(_INO) == [number, _INO]
    assert kernel.inodes.content(_INO) is former
    assert kernel.inodes.number_of(newer) == number

    kernel.inodes = KernelInodes(lambda file: file in kernel.opened)
    kernel.inodes.go_on({_INO: former})
    assert kernel.inodes.number(_INO) != _INO
    kernel.open()
    with pytest.raises(Stale):
        kernel.inodes.opens(_THREAD, _INO, newer)


def test_look_ups_that_nobody_counted_end_no_number_while_a_former_content_is_open(
    kernel: Kernel,
) -> None:
    former = kernel.open()
    kernel.inodes.part(former)
    former.is_former = True
    number = kernel.inodes.number(_INO)
    kernel.inodes.forget(_INO)
    assert kernel.inodes.number(_INO) == number
    kernel.opened.remove(former)
    kernel.inodes.forget(_INO)
    assert kernel.inodes.number(_INO) == _INO
