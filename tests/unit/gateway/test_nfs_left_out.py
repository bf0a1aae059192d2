"""What NFS-Ganesha does not serve of what it was told to is known by name."""

from gateway.nfs import exports
from gateway.nfs.exports import Exported
from gateway.nfs.ganesha import Ganesha
from gateway.nfs.ganesha_config import Server, first_lines, render

SERVER = Server("127.0.0.1", 2049, 20048, True, "/state", 7)
LOG = """\
18/11/2026 : epoch 1 : vm : ganesha.nfsd-1[main] config_errs_to_log :CONFIG :CRIT :{0}
18/11/2026 : epoch 1 : vm : ganesha.nfsd-1[main] x :EXPORT :CRIT :Could not create export
18/11/2026 : epoch 1 : vm : ganesha.nfsd-1[main] x :CONFIG :CRIT :Config File (/c:{1}): Errors pro\
cessing block (EXPORT)
18/11/2026 : epoch 1 : vm : ganesha.nfsd-1[main] x :CONFIG :CRIT :Config File (/c:{1}): 1 errors
"""


def test_an_export_that_is_left_out_is_found_with_its_reason() -> None:
    how = exports.make([], squash="root", read_only=False, groups="client")
    text = render(SERVER, [(Exported(number, f"n{number}", how), "/x") for number in (3, 4)])
    lines = first_lines(text)
    assert [text.splitlines()[line] for line in lines] == [
        "    Export_Id = 3;",
        "    Export_Id = 4;",
    ]
    ganesha = Ganesha(-1)
    for line in LOG.format(f"Config File (/c:{lines[1] + 9}): it is wrong", lines[1]).splitlines():
        ganesha._line(line)
    assert ganesha.left_out == {lines[1]: "it is wrong; Could not create export"}
