"""The source of the programs: its constants, and the sizes of its maps."""

from __future__ import annotations

from lockd.load.source import assemble


def test_constants_are_the_same_on_every_architecture() -> None:
    constants = assemble(["include/arch.bpf.h"], {}).constants
    assert constants["NR_KERNEL"] == -2
    assert not {"NR_FUTEX", "NR_CLONE", "NR_EPOLL_WAIT", "NR_EPOLL_PWAIT"} & constants.keys()
