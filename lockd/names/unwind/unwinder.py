"""The unwinder: finds the stack of a captured thread, frame by frame, from its capture.

The caller of a frame is found by the unwinding rule of the object file. Hand-written code, JIT-compiled code
and code without tables have no rule. There the unwinder uses the best evidence that it finds. On x86-64 this
is a return address on the stack behind a call of this very function, otherwise the frame pointer, otherwise
the nearest return address on the stack. On arm64 it is a return address in the link register behind a call of
this very function, otherwise the frame pointer.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Protocol

from lockd.names.objects.elfutils import UnwindRule
from lockd.names.unwind.capture import Capture
from lockd.names.unwind.expressions import UnknownValue, evaluate

MAX_FRAMES = 32
SCANNED_BYTES = 512
"""Bytes above the stack pointer in which a return address counts as the caller's without other evidence."""
ADDRESS = 2**64 - 1
ARM64_ADDRESS = 2**48 - 1
"""The bits of an address of arm64. The higher bits of a return address may have a signature."""
CALL, INDIRECT = 1, 2
"""Kinds of call instructions: with the target in the instruction, or in a register or in memory."""
STUB_BYTES = 64
"""Bytes of a function that are searched for a jump to another function."""


class Code(Protocol):
    """The code of a process, by addresses in its memory. AddressSpace is the implementation."""

    def rule(self, address: int) -> UnwindRule | None: ...
    def is_executable(self, address: int) -> bool: ...
    def is_jit_code(self, address: int) -> bool: ...
    def is_same_mapping(self, address: int, other: int) -> bool: ...
    def code(self, address: int, size: int) -> bytes: ...
    def function_start(self, address: int) -> int: ...
    def refresh(self) -> bool: ...


@dataclass(frozen=True)
class Machine:
    """The DWARF numbers of a machine's special registers."""

    stack: int
    """The stack pointer."""
    frame: int
    """The frame pointer."""
    return_address: int
    program: int
    """The program counter."""
    is_arm64: bool


MACHINES = {17: Machine(7, 6, 16, 16, False), 33: Machine(31, 29, 30, 32, True)}
"""The machines x86-64 and arm64, by the number of captured registers."""
PUSHES = {b"\x55": 6, b"\x53": 3, b"\x41\x54": 12, b"\x41\x55": 13, b"\x41\x56": 14, b"\x41\x57": 15}
"""Push instructions at the beginning of x86-64 functions, each with the DWARF number of the register."""
SETS_FRAME_POINTER = b"\x48\x89\xe5"
SKIPPED = (b"\xf3\x0f\x1e\xfa", SETS_FRAME_POINTER)
"""Other instructions that occur between the push instructions: endbr64 and mov %rsp, %rbp."""


def unwind(code: Code, capture: Capture) -> tuple[int, ...]:
    """An address in each function of the stack, innermost first, at most MAX_FRAMES addresses.

    The first one is the address at which the thread will continue. The others lie one byte before a return
    address, and so in the call instruction. Only in a function that a signal interrupted, and in the code
    that a signal handler returns to, the address is that of the next instruction.
    """
    return tuple(place for place, _ in unwind_returns(code, capture, MAX_FRAMES))


def unwind_returns(code: Code, capture: Capture, max_frames: int) -> tuple[tuple[int, int], ...]:
    """At most `max_frames` pairs: an address as unwind() returns it, and where its function will continue.

    Debuggers show the second address. Where the first one lies in a call, the second one is a byte later: it
    is the return address.
    """
    if len(capture.registers) not in MACHINES:
        return tuple((address - (i > 0), address) for i, address in enumerate(capture.frames[:max_frames]))
    machine = MACHINES[len(capture.registers)]
    walk = _Walk(code, capture, machine)
    found = walk.walk(max_frames)
    # The memory map may be older than the code that the thread runs: a library that was just loaded, or a
    # function that was just compiled.
    if walk.may_lack_mappings and code.refresh():
        return _Walk(code, capture, machine).walk(max_frames)
    return found


class _Walk:
    """One walk from the innermost to the outermost frame of a capture."""

    def __init__(self, code: Code, capture: Capture, machine: Machine) -> None:
        self._code = code
        self._machine = machine
        self._kernel_frames = capture.frames
        self._registers = dict(enumerate(capture.registers))
        self._bottom = self._registers[machine.stack]
        self._words: tuple[int, ...] = struct.unpack_from(f"<{len(capture.stack) // 8}Q", capture.stack)
        self._is_complete = self._was_guessed = False
        self._is_exact = False
        """Whether no call lies before the address that was found last: it is in a function that a signal
        interrupted, or in the code that a signal handler returns to."""
        self.may_lack_mappings = False
        """Whether an old memory map may be the reason why the walk ended: by this map a return address is no
        code, or no caller was found for code without a rule."""

    def walk(self, max_frames: int) -> tuple[tuple[int, int], ...]:
        program = self._machine.program
        returns = [self._registers[program]]
        places = [returns[0]]
        while len(places) < max_frames:
            rule = self._code.rule(places[-1])
            self._is_exact = False
            registers = self._by_rule(rule) if rule else None
            if registers is None and not self._is_complete and (not rule or self._was_guessed):
                registers = self._by_guess(places[-1])
                self._was_guessed = True
                self.may_lack_mappings |= registers is None
            if registers is None:
                break
            self._registers = registers
            returns.append(registers[program])
            places.append(registers[program] - (not self._is_exact))
        if not self._is_complete:
            beyond = self._beyond(returns)
            returns += beyond
            places += [address - 1 for address in beyond]
        return tuple(zip(places[:max_frames], returns[:max_frames], strict=True))

    def _by_rule(self, rule: UnwindRule) -> dict[int, int] | None:
        """The caller's registers; None if there is no caller, or if a needed value was not captured."""
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
                    except UnknownValue:
                        caller.pop(register, None)
        except UnknownValue:
            return None
        if rule.registers.get(rule.return_register, ()) is None:
            self._is_complete = True
        address = self._without_signature(caller.get(rule.return_register, 0))
        if not address:
            return None
        # A signal can interrupt any instruction, and its handler returns to code that made no call.
        is_exact = rule.is_signal
        if not self._is_return(address, is_exact) and not (is_exact := self._ends_signal(address)):
            self.may_lack_mappings |= not self._code.is_executable(address)
            return None
        # If the return address is in a register, the frame may be empty: vfork() of x86-64.
        frame_bytes = cfa - self._registers[machine.stack]
        can_be_empty = machine.is_arm64 or frame_bytes == 0
        grows = frame_bytes > 0 or (address != self._program_counter and can_be_empty)
        caller[machine.program] = address
        if not grows and not rule.is_signal:
            return None
        self._is_exact = is_exact
        return caller

    @property
    def _program_counter(self) -> int:
        return self._registers[self._machine.program]

    def _without_signature(self, address: int) -> int:
        return address & ARM64_ADDRESS if self._machine.is_arm64 else address

    def _is_return(self, address: int, is_signal: bool) -> bool:
        """Whether an address is behind a call instruction; after a signal, whether it is executable."""
        return self._code.is_executable(address) and (is_signal or self._call_before(address)[0] > 0)

    def _ends_signal(self, address: int) -> bool:
        """Whether a signal handler returns to this address: to code that resumes what was interrupted."""
        rule = self._code.rule(address) if self._code.is_executable(address) else None
        return rule is not None and rule.is_signal

    def _by_guess(self, place: int) -> dict[int, int] | None:
        """The caller's registers for code without a rule; None if there is no evidence of a caller."""
        machine = self._machine
        start = self._code.function_start(place)
        if machine.is_arm64:
            return self._by_link_register(start) or self._by_frame_pointer()
        possible: list[int] = []
        bottom = self._registers[machine.stack]
        for location, kind, target in self._returns:
            if location < bottom:
                continue
            if kind == CALL and self._leads_to(target, start):
                return self._return_from(location, start)
            is_possible = kind == INDIRECT or start >= 0 or self._may_lead_to(target, place)
            if is_possible and location < bottom + SCANNED_BYTES:
                possible.append(location)
        # JIT-compiled code is mostly called by JIT-compiled code: return addresses in such code come first.
        # Earlier calls into libraries have left other return addresses on the stack.
        if self._code.is_jit_code(place):
            possible.sort(key=lambda location: not self._code.is_jit_code(self._read(location)))
        by_frame_pointer = self._by_frame_pointer() if self._may_keep_frame_pointer(start) else None
        return by_frame_pointer or (self._return_from(possible[0], start) if possible else None)

    @functools.cached_property
    def _returns(self) -> list[tuple[int, int, int]]:
        """For each word on the stack that can be a return address: where it is, and the call's kind and
        target."""
        found = []
        for i, word in enumerate(self._words):
            if self._code.is_executable(word):
                kind, target = self._call_before(word)
                if kind:
                    found.append((self._bottom + 8 * i, kind, target))
        return found

    def _may_lead_to(self, target: int, place: int) -> bool:
        """Whether a call of `target` can lead to the function around `place`, whose beginning is not known.

        It can if `target` is in the mapping of `place`, or if no known function begins at `target`, as in a
        linker's stub.
        """
        return self._code.is_same_mapping(target, place) or self._code.function_start(target) != target

    def _leads_to(self, target: int, start: int) -> bool:
        """Whether a call leads to the function at `start`, directly or by a function that jumps there."""
        if target == start or start < 0:
            return target == start
        code = self._code.code(target, STUB_BYTES)
        jump = code.find(b"\xe9")
        while 0 <= jump <= len(code) - 5:
            distance = int.from_bytes(code[jump + 1 : jump + 5], "little", signed=True)
            if target + jump + 5 + distance == start:
                return True
            jump = code.find(b"\xe9", jump + 1)
        return False

    def _may_keep_frame_pointer(self, start: int) -> bool:
        """Whether the first instructions of a function set the frame pointer, or its beginning is not known
        (`start` < 0)."""
        return start < 0 or SETS_FRAME_POINTER in self._code.code(start, 32)

    def _return_from(self, at: int, start: int) -> dict[int, int]:
        """The caller's registers, if the return address is at the address `at` on the stack.

        Registers that the function at `start` pushes first are read from the words below the return address.
        """
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
                except UnknownValue:
                    break
            code = code[len(skipped) :] if skipped else b""
        return caller

    def _by_frame_pointer(self) -> dict[int, int] | None:
        """The caller's registers, if the frame pointer leads to a return address; otherwise None."""
        machine = self._machine
        frame = self._registers.get(machine.frame, 0)
        if frame % 8 or frame < self._registers[machine.stack]:
            return None
        try:
            saved, address = self._read(frame), self._without_signature(self._read(frame + 8))
        except UnknownValue:
            return None
        # Methods in HotSpot's interpreter return to addresses that are not behind a call.
        is_jit_code = self._code.is_jit_code(self._program_counter) and self._code.is_jit_code(address)
        if not self._is_return(address, False) and not (is_jit_code and saved > frame):
            return None
        return {
            **self._registers, machine.frame: saved, machine.stack: frame + 16, machine.program: address,
            machine.return_address: address,
        }  # fmt: skip

    def _by_link_register(self, start: int) -> dict[int, int] | None:
        """The caller's registers on arm64, if the link register has the address behind a call of `start`, the
        beginning of the present function; otherwise None."""
        address = self._without_signature(self._registers.get(self._machine.return_address, 0))
        if address == self._program_counter or self._call_before(address) != (CALL, start):
            return None
        return {**self._registers, self._machine.program: address}

    def _call_before(self, address: int) -> tuple[int, int]:
        """Kind and target of the call before an address. Kind 0: there is no call. Target 0: unknown."""
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
        """The word at an address of the captured stack. Raises UnknownValue outside of it."""
        index, shift = divmod(address - self._bottom, 8)
        if not 0 <= index < len(self._words) or (shift and index + 1 >= len(self._words)):
            raise UnknownValue(f"the word at {address:#x} was not captured")
        if not shift:
            return self._words[index]
        return (self._words[index] >> 8 * shift | self._words[index + 1] << 64 - 8 * shift) & ADDRESS

    def _beyond(self, returns: list[int]) -> list[int]:
        """Return addresses that only the kernel found, by frame pointers, beyond the last frame found here.

        The list is empty if the kernel did not find that last frame.
        """
        if returns[-1] not in self._kernel_frames:
            return []
        last = self._kernel_frames.index(returns[-1])
        return list(self._kernel_frames[last + 1 :])


def _ends_in_indirect_call(code: bytes) -> bool:
    """Whether the bytes end in an x86-64 call instruction whose target is in a register or in memory."""
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
