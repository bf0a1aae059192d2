"""What a holder of a mount is asked."""

import threading
from pathlib import Path

from gateway.holder import claim


def test_a_holder_that_does_not_run_yet_is_told_to_end_the_mount(tmp_path: Path) -> None:
    words = []
    with claim.listening(tmp_path) as listener:
        listener.settimeout(60)

        def answer() -> None:
            caller, _ = listener.accept()
            with caller:
                words.append(caller.recv(16))
                caller.send(b"done")

        answering = threading.Thread(target=answer)
        answering.start()
        claim.give_up(tmp_path)
        answering.join()
    assert words == [b"abort"]
