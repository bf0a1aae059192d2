"""The filter of system calls, run as the kernel does; and what the kernel's log tells of it."""

import struct

import pytest

from gateway import system_calls
from gateway.nfs.name_guard import Machine, machine

X86_64, AARCH64 = Machine(0xC000003E, 317, {}), Machine(0xC00000B7, 277, {})
ALLOWED, REFUSED = 0x7FFF0000, 0x00050001
READ = 0
LINE = (
    "5,1,2,-;audit: type=1326 audit(1795789321.775:4): auid=1 uid=0 gid=0 ses=1 pid=%d"
    ' comm="python" exe="/usr/bin/python3.11" sig=0 arch=c000003e syscall=%d compat=0 code=0x50000'
)


def verdict(code: bytes, number: int, audit: int) -> int:
    parts, at, value = list(struct.iter_unpack("=HBBI", code)), 0, 0
    while True:
        kind, yes, no, operand = parts[at]
        at += 1
        if kind == 0x20:
            value = {0: number, 4: audit}[operand]
        elif kind == 0x15:
            at += yes if value == operand else no
        elif kind == 0x35:
            at += yes if value >= operand else no
        else:
            assert kind == 6
            return int(operand)


@pytest.mark.parametrize(("kind", "which"), [(X86_64, 0), (AARCH64, 1)])
def test_what_is_named_is_refused_and_nothing_else(kind: Machine, which: int) -> None:
    code = system_calls.program(kind)
    refused = {each[which] for each in system_calls.NEEDLESS.values()} - {None}
    for number in range(600):
        expected = REFUSED if number in refused else ALLOWED
        assert verdict(code, number, kind.audit) == expected, number


def test_other_tables_of_numbers_are_refused_whole() -> None:
    code = system_calls.program(X86_64)
    assert verdict(code, READ, X86_64.audit) == ALLOWED
    assert verdict(code, READ | 0x40000000, X86_64.audit) == REFUSED  # x32
    assert verdict(code, READ, 0x40000003) == REFUSED  # i386


@pytest.mark.skipif(machine().audit != X86_64.audit, reason="numbers of x86_64")
def test_the_kernel_s_log_names_what_a_node_was_refused() -> None:
    bpf, acct, unknown, of_others = LINE % (7, 321), LINE % (7, 163), LINE % (8, 999), LINE % (9, 1)
    log = ["6,1,2,-;usb 1-1: new device", bpf, bpf, acct, of_others, unknown]
    assert system_calls.refused_in(log, {7, 8}) == ["acct", "bpf", "number 999"]
