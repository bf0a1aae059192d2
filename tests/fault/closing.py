"""Writes a file again and closes it, in a process that may get signals; says what became of it.

Usage: python tests/fault/closing.py PATH CONTENT; prints `written`, waits for a line, prints
`closing`, then `closed` or the name of the close's error.
"""

import errno
import os
import signal
import sys


def main(path: str, content: str) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, content.encode())
    print("written", flush=True)
    sys.stdin.readline()
    print("closing", flush=True)
    try:
        os.close(fd)
    except OSError as error:
        print(errno.errorcode[error.errno or 0], flush=True)
    else:
        print("closed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
