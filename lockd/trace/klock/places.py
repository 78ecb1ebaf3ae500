"""Where kernel locks are taken and what they are called, by the numbers of stacks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lockd.columns.structs import Columns
from lockd.trace.core.call_stacks import CallStacks

NO_STACK = "[stack lost]"
"""In place of its functions."""


class Places:
    """`types`: names of lock types by number. Functions are NAME+0xOFFSET, innermost first."""

    def __init__(self, stacks: CallStacks, types: tuple[str, ...]) -> None:
        self._stacks, self._types = stacks, types
        self._callers: dict[int, tuple[str, ...]] = {}
        self._locks: dict[tuple[int, int, int], str] = {}

    def whole(self, stack: int) -> tuple[str, ...]:
        """All functions of a stack."""
        return self._stacks.names.kernel_places(self._stacks.kernel_addresses(stack)) or (NO_STACK,)

    def callers(self, stack: int) -> tuple[str, ...]:
        """The functions of a stack without those of the lock itself on top."""
        if stack not in self._callers:
            addresses = self._stacks.kernel_addresses(stack)
            self._callers[stack] = self._stacks.names.kernel_places(addresses, True) or (NO_STACK,)
        return self._callers[stack]

    def lock(self, address: int, type_: int, stack: int, is_mmap_lock: bool = False) -> str:
        """The name of a lock that was taken in that stack; its address if it has none."""
        key = address, type_, stack
        if key not in self._locks:
            addresses = self._stacks.kernel_addresses(stack)
            name = self._stacks.names.kernel_lock(address, self._types[type_], addresses, is_mmap_lock)
            self._locks[key] = name
        return self._locks[key]

    def chosen(self, rows: Columns, caller: str, lock: str) -> npt.NDArray[np.bool_]:
        """The rows of callers whose names begin with `caller`, and of the lock with that name or address."""
        mask = np.ones(len(rows), np.bool_)
        if caller:
            known = [s for s in np.unique(rows["stack"]).tolist() if self.callers(s)[0].startswith(caller)]
            mask &= np.isin(rows["stack"], np.array(known, np.uint64))
        if lock:
            numbers = (rows[name].tolist() for name in ("lock", "type", "stack", "is_mmap_lock"))
            mask &= np.array(
                [lock in (f"{one:#x}", self.lock(one, *rest)) for one, *rest in zip(*numbers, strict=True)],
                np.bool_,
            )
        return mask
