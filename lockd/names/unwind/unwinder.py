"""Stacks of blocked threads, frame by frame, from the registers and the stack bytes that were captured.

A frame is left by the object's own unwinding rule. Code that has none (hand-written, compiled as it
runs, or built without tables) is left by the best proof at hand: a return address on the stack behind a
call of the very function, else a frame pointer, else the first return address near by.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Protocol

from lockd.names.objects.libdw import Rule
from lockd.names.unwind.capture import Capture
from lockd.names.unwind.expressions import Unknown, evaluate

MOST_FRAMES = 32
SCANNED = 512
"""Bytes of stack that are looked through for a return address that nothing else speaks for."""
ADDRESS = 2**64 - 1
CALL, INDIRECT = 1, 2
STUB = 64
"""Bytes of a function that are looked through for a jump to another."""


class Code(Protocol):
    """The program text of a process, by addresses in its memory.

    Compiled is what was made as the program ran, and is in no object.
    """

    def rule(self, address: int) -> Rule | None: ...
    def is_executable(self, address: int) -> bool: ...
    def is_compiled(self, address: int) -> bool: ...
    def is_together(self, address: int, other: int) -> bool: ...
    def code(self, address: int, size: int) -> bytes: ...
    def function_start(self, address: int) -> int: ...


@dataclass(frozen=True)
class Machine:
    """Registers by their DWARF numbers."""

    stack: int
    frame: int
    return_address: int
    program: int
    is_arm64: bool


MACHINES = {17: Machine(7, 6, 16, 16, False), 33: Machine(31, 29, 30, 32, True)}
"""By the number of captured registers: x86-64 and arm64."""
PUSHES = {b"\x55": 6, b"\x53": 3, b"\x41\x54": 12, b"\x41\x55": 13, b"\x41\x56": 14, b"\x41\x57": 15}
"""What a function of x86-64 saves first, by instruction."""
SETS_FRAME_POINTER = b"\x48\x89\xe5"
SKIPPED = (b"\xf3\x0f\x1e\xfa", SETS_FRAME_POINTER)
"""Instructions among those: endbr64; mov %rsp, %rbp."""


def unwind(code: Code, capture: Capture, most: int = MOST_FRAMES) -> tuple[int, ...]:
    """Addresses in the functions of the stack, innermost first and `most` of them: the very instruction,
    then one byte before each return address, which is in the call itself.
    """
    return tuple(place for place, _ in unwind_returns(code, capture, most))


def unwind_returns(code: Code, capture: Capture, most: int = MOST_FRAMES) -> tuple[tuple[int, int], ...]:
    """The same, each with the address that debuggers show for it: where the function goes on."""
    if len(capture.registers) not in MACHINES:
        return tuple((address - (i > 0), address) for i, address in enumerate(capture.frames[:most]))
    return _Walk(code, capture, MACHINES[len(capture.registers)]).walk(most)


class _Walk:
    def __init__(self, code: Code, capture: Capture, machine: Machine) -> None:
        self._code = code
        self._machine = machine
        self._kernel_frames = capture.frames
        self._registers = dict(enumerate(capture.registers))
        self._bottom = self._registers[machine.stack]
        self._words: tuple[int, ...] = struct.unpack_from(f"<{len(capture.stack) // 8}Q", capture.stack)
        self._is_complete = self._was_guessed = False

    def walk(self, most: int) -> tuple[tuple[int, int], ...]:
        program = self._machine.program
        returns = [self._registers[program]]
        places = [returns[0]]
        is_exact = True
        while len(places) < most:
            rule = self._code.rule(places[-1])
            registers = self._by_rule(rule) if rule else None
            if registers is None and not self._is_complete and (not rule or self._was_guessed):
                registers, rule = self._by_guess(places[-1]), None
                self._was_guessed = True
            if registers is None:
                break
            self._registers = registers
            # The interrupted instruction of a signal's frame is no call.
            is_exact = bool(rule and rule.is_signal)
            returns.append(registers[program])
            places.append(registers[program] - (not is_exact))
        if not self._is_complete:
            beyond = self._beyond(returns)
            returns += beyond
            places += [address - 1 for address in beyond]
        return tuple(zip(places[:most], returns[:most], strict=True))

    def _by_rule(self, rule: Rule) -> dict[int, int] | None:
        """The caller's registers; none if there is no caller, or what is needed was not captured."""
        machine = self._machine
        caller = dict(self._registers)
        try:
            cfa = evaluate(rule.cfa, self._registers, 0, self._read)
            caller[machine.stack] = cfa
            for register, expression in rule.registers.items():
                if expression is None:
                    caller.pop(register, None)
                else:
                    try:
                        caller[register] = evaluate(expression, self._registers, cfa, self._read, True)
                    except Unknown:
                        caller.pop(register, None)
        except Unknown:
            return None
        if rule.registers.get(rule.return_register, ()) is None:
            self._is_complete = True
        address = caller.get(rule.return_register)
        if not address or not self._is_return(address, rule.is_signal):
            return None
        # With the return address in a register there may be nothing on the stack: vfork() of x86-64.
        taken = cfa - self._registers[machine.stack]
        grows = taken > 0 or (address != self._here and (machine.is_arm64 or taken == 0))
        caller[machine.program] = address
        return caller if grows or rule.is_signal else None

    @property
    def _here(self) -> int:
        return self._registers[self._machine.program]

    def _is_return(self, address: int, is_signal: bool) -> bool:
        return self._code.is_executable(address) and (is_signal or self._call_before(address)[0] > 0)

    def _by_guess(self, place: int) -> dict[int, int] | None:
        machine = self._machine
        start = self._code.function_start(place)
        if machine.is_arm64:
            return self._by_link_register(start) or self._by_frame_pointer()
        possible: list[int] = []
        bottom = self._registers[machine.stack]
        for at, kind, target in self._returns:
            if at < bottom:
                continue
            if kind == CALL and self._leads_to(target, start):
                return self._left(at, start)
            is_possible = kind == INDIRECT or start >= 0 or self._may_lead_to(target, place)
            if is_possible and at < bottom + SCANNED:
                possible.append(at)
        if self._code.is_compiled(place):  # which its like calls; libraries it called left more behind
            possible.sort(key=lambda at: not self._code.is_compiled(self._read(at)))
        by_frame_pointer = self._by_frame_pointer() if self._may_keep_frame_pointer(start) else None
        return by_frame_pointer or (self._left(possible[0], start) if possible else None)

    @functools.cached_property
    def _returns(self) -> list[tuple[int, int, int]]:
        """What could be return addresses: where on the stack, the sort of the call, and its target."""
        found = []
        for i, word in enumerate(self._words):
            if self._code.is_executable(word):
                kind, target = self._call_before(word)
                if kind:
                    found.append((self._bottom + 8 * i, kind, target))
        return found

    def _may_lead_to(self, target: int, place: int) -> bool:
        """Whether a call may be of the unknown function at `place`: of near by, or of a stub for linking."""
        return self._code.is_together(target, place) or self._code.function_start(target) != target

    def _leads_to(self, target: int, start: int) -> bool:
        """Whether a call is of the function at `start`, maybe by a short one that ends in a jump there."""
        if target == start or start < 0:
            return target == start
        code = self._code.code(target, STUB)
        at = code.find(b"\xe9")
        while 0 <= at <= len(code) - 5:
            offset = int.from_bytes(code[at + 1 : at + 5], "little", signed=True)
            if target + at + 5 + offset == start:
                return True
            at = code.find(b"\xe9", at + 1)
        return False

    def _may_keep_frame_pointer(self, start: int) -> bool:
        """By how the function begins, if that is known."""
        return start < 0 or SETS_FRAME_POINTER in self._code.code(start, 32)

    def _left(self, at: int, start: int) -> dict[int, int]:
        """The caller's registers if the return address is at `at`, by what the function saves first."""
        machine = self._machine
        caller = {**self._registers, machine.stack: at + 8, machine.program: self._read(at)}
        code = self._code.code(start, 32) if start > 0 else b""
        while code:
            saved = next((i for i in PUSHES if code.startswith(i)), b"")
            skipped = saved or next((i for i in SKIPPED if code.startswith(i)), b"")
            if saved:
                at -= 8
                try:
                    caller[PUSHES[saved]] = self._read(at)
                except Unknown:
                    break
            code = code[len(skipped) :] if skipped else b""
        return caller

    def _by_frame_pointer(self) -> dict[int, int] | None:
        machine = self._machine
        frame = self._registers.get(machine.frame, 0)
        if frame % 8 or frame < self._registers[machine.stack]:
            return None
        try:
            saved, address = self._read(frame), self._read(frame + 8)
        except Unknown:
            return None
        # HotSpot's interpreter has its methods return to elsewhere than behind a call.
        is_compiled = self._code.is_compiled(self._here) and self._code.is_compiled(address)
        if not self._is_return(address, False) and not (is_compiled and saved > frame):
            return None
        return {
            **self._registers, machine.frame: saved, machine.stack: frame + 16, machine.program: address,
            machine.return_address: address,
        }  # fmt: skip

    def _by_link_register(self, start: int) -> dict[int, int] | None:
        address = self._registers.get(self._machine.return_address, 0)
        if address == self._here or self._call_before(address) != (CALL, start):
            return None
        return {**self._registers, self._machine.program: address}

    def _call_before(self, address: int) -> tuple[int, int]:
        """The sort of the call that returns to `address`, 0 if there is none, and its target if known."""
        if self._machine.is_arm64:
            code = self._code.code(address - 4, 4)
            word = int.from_bytes(code, "little")
            if len(code) == 4 and word >> 26 == 0x25:
                offset = (word & 0x3FFFFFF) - ((word & 0x2000000) << 1)
                return CALL, (address - 4 + 4 * offset) & ADDRESS
            return (INDIRECT, 0) if word & 0xFFFFFC1F == 0xD63F0000 else (0, 0)
        code = self._code.code(address - 8, 8)
        if len(code) == 8 and code[3] == 0xE8:
            return CALL, (address + int.from_bytes(code[4:], "little", signed=True)) & ADDRESS
        return (INDIRECT, 0) if _ends_in_indirect_call(code) else (0, 0)

    def _read(self, address: int) -> int:
        """A word of the captured stack."""
        at, beside = divmod(address - self._bottom, 8)
        if not 0 <= at < len(self._words) or (beside and at + 1 >= len(self._words)):
            raise Unknown(f"the word at {address:#x} was not captured")
        if not beside:
            return self._words[at]
        return (self._words[at] >> 8 * beside | self._words[at + 1] << 64 - 8 * beside) & ADDRESS

    def _beyond(self, returns: list[int]) -> list[int]:
        """What the kernel found further out by frame pointers, if it met the last frame found here."""
        if returns[-1] not in self._kernel_frames:
            return []
        at = self._kernel_frames.index(returns[-1])
        return list(self._kernel_frames[at + 1 :])


def _ends_in_indirect_call(code: bytes) -> bool:
    """Whether a `call` through a register or memory of x86-64 ends where these bytes end."""
    for length in range(2, min(7, len(code)) + 1):
        opcode, operand = code[-length], code[-length + 1]
        if opcode == 0xFF and operand & 0x38 == 0x10:
            mode, base = operand >> 6, operand & 7
            size = 2 + (mode != 3 and base == 4) + (0, 1, 4, 0)[mode] + 4 * (mode == 0 and base == 5)
            if mode == 0 and base == 4 and length > 2 and code[-length + 2] & 7 == 5:
                size += 4
            if size == length:
                return True
    return False
