"""Stacks from captured bytes where no unwinding rule tells how, on a small machine with given code."""

from __future__ import annotations

import struct

import pytest

from lockd.names.objects.elfutils import UnwindRule
from lockd.names.unwind.capture import Capture
from lockd.names.unwind.expressions import UnknownValue, evaluate
from lockd.names.unwind.unwinder import unwind

STACK = 0x7FFE0000
NEAR = b"\xe8"
INDIRECT = bytes.fromhex("ff15 00000000")


class Text:
    """Code at 0x1000..0x5000, functions each 0x100 bytes long, and rules by address."""

    def __init__(self) -> None:
        self.memory = bytearray(0x5000)
        self.rules: dict[int, UnwindRule] = {}
        self.named = range(0x1000, 0x5000)

    def call(self, returns_to: int, target: int) -> int:
        self.memory[returns_to - 5 : returns_to] = NEAR + struct.pack("<i", target - returns_to)
        return returns_to

    def put(self, end: int, code: bytes) -> int:
        self.memory[end - len(code) : end] = code
        return end

    def rule(self, address: int) -> UnwindRule | None:
        return self.rules.get(address)

    def is_executable(self, address: int) -> bool:
        return 0x1000 <= address < 0x5000

    def is_jit_code(self, address: int) -> bool:
        return self.is_executable(address) and address not in self.named

    def is_same_mapping(self, address: int, other: int) -> bool:
        return self.is_executable(address) and self.is_executable(other)

    def code(self, address: int, size: int) -> bytes:
        return bytes(self.memory[address : address + size]) if address >= 0 else b""

    def function_start(self, address: int) -> int:
        return address & ~0xFF if address in self.named else -1

    def refresh(self) -> bool:
        return False


def capture(words: list[int], ip: int = 0x1010, frame: int = 0, frames: tuple[int, ...] = ()) -> Capture:
    registers = [0] * 17
    registers[6], registers[7], registers[16] = frame, STACK, ip
    return Capture(tuple(registers), struct.pack(f"<{len(words)}Q", *words), frames or (ip,), 0)


def test_the_caller_is_who_calls_the_very_function() -> None:
    """A return address that earlier calls have left on the stack is not that of the caller."""
    text = Text()
    stale, caller = text.call(0x3050, 0x4000), text.call(0x2050, 0x1000)
    assert unwind(text, capture([7, stale, 0x1234, caller])) == (0x1010, 0x204F)


def test_a_call_by_way_of_a_jump() -> None:
    text = Text()
    text.memory[0x4000:0x4005] = b"\xe9" + struct.pack("<i", 0x1000 - 0x4005)
    stale, caller = text.call(0x3050, 0x4100), text.call(0x2050, 0x4000)
    assert unwind(text, capture([stale, caller]))[1] == 0x204F


@pytest.mark.parametrize(
    "code",
    [
        "ffd0",
        "41ffd4",
        "ff5008",
        "ff9000010000",
        "ff1424",
        "ff542408",
        "ff1500000000",
        "41ff542408",
        "ff94c300010000",
    ],
)
def test_calls_through_registers_and_memory(code: str) -> None:
    text = Text()
    caller = text.put(0x2050, bytes.fromhex(code))
    assert unwind(text, capture([1, 2, caller])) == (0x1010, 0x204F)


def test_what_is_behind_no_call_is_no_return_address() -> None:
    text = Text()
    assert unwind(text, capture([0x2050, 0x1234, 0x3000])) == (0x1010,)


def test_a_frame_pointer_counts_only_if_the_function_keeps_one() -> None:
    for keeps in (True, False):
        text = Text()
        if keeps:
            text.memory[0x1000:0x1004] = bytes.fromhex("554889e5")
        near, framed = text.put(0x2050, INDIRECT), text.put(0x3050, INDIRECT)
        words = [near, 0, 0, framed]
        assert unwind(text, capture(words, frame=STACK + 16))[1] == (0x304F if keeps else 0x204F)


def test_compiled_code_by_frame_pointers_that_lead_outwards() -> None:
    """The return addresses are behind no call, as when HotSpot's interpreter returns."""
    text = Text()
    text.named = range(0x3000, 0x5000)
    stale = text.put(0x3050, INDIRECT)
    framed = [stale, STACK + 32, 0x2050, 0, STACK + 48, 0x2150]
    assert unwind(text, capture(framed, frame=STACK + 8)) == (0x1010, 0x204F, 0x214F)
    framed[1] = STACK  # leads inwards
    assert unwind(text, capture(framed, frame=STACK + 8))[1] == 0x304F


def test_compiled_code_is_rather_called_by_its_like() -> None:
    text = Text()
    text.named = range(0x3000, 0x5000)
    stale, caller = text.put(0x3050, INDIRECT), text.put(0x2050, INDIRECT)
    assert unwind(text, capture([stale, 7, caller]))[1] == 0x204F


def test_saved_registers_are_restored_for_the_rules_further_out() -> None:
    text = Text()
    text.memory[0x1000:0x1003] = bytes.fromhex("415455")  # push %r12; push %rbp
    caller, outer = text.call(0x2050, 0x1000), text.put(0x3050, INDIRECT)
    text.rules[0x204F] = UnwindRule(((0x76, 16, 0),), {16: ((0x9C, 0, 0), (0x23, 2**64 - 8, 0))}, 16, False)
    words = [STACK + 40, 0x12, caller, 0, 0, 0, outer]  # rbp, r12, the return address
    assert unwind(text, capture(words)) == (0x1010, 0x204F, 0x304F)


def test_what_the_kernel_found_goes_on_where_the_stack_bytes_end() -> None:
    text = Text()
    caller, beyond = text.call(0x2050, 0x1000), 0x4050
    assert unwind(text, capture([caller], frames=(0x1010, caller, beyond)))[1:] == (0x204F, 0x404F)
    assert unwind(text, capture([caller], frames=(0x1010, beyond)))[1:] == (0x204F,)


def test_a_rule_that_says_that_there_is_no_caller_ends_the_stack() -> None:
    text = Text()
    caller = text.call(0x2050, 0x1000)
    text.rules[0x1010] = UnwindRule(((0x77, 8, 0),), {16: None}, 16, False)
    assert unwind(text, capture([caller, caller], frames=(0x1010, caller))) == (0x1010,)


def test_what_a_signal_handler_returns_to_and_what_was_interrupted_are_behind_no_call() -> None:
    text = Text()
    for place in (0x1010, 0x2040):
        saved = {16: ((0x9C, 0, 0), (0x23, 2**64 - 8, 0))}
        text.rules[place] = UnwindRule(((0x77, 8, 0),), saved, 16, is_signal=place == 0x2040)
    assert unwind(text, capture([0x2040, 0x3030])) == (0x1010, 0x2040, 0x3030)


def test_no_more_frames_than_are_wanted_and_no_loop() -> None:
    text = Text()
    caller = text.call(0x1050, 0x1000)  # it calls itself
    assert len(unwind(text, capture([caller] * 512))) == 32
    assert unwind(text, capture([])) == (0x1010,)


@pytest.mark.parametrize("signature", [0, 0x2B << 48])
def test_arm64(signature: int) -> None:
    """Return addresses may be signed."""
    text = Text()
    text.memory[0x204C:0x2050] = struct.pack("<I", 0x94000000 | ((0x1000 - 0x204C) // 4 & 0x3FFFFFF))
    text.memory[0x304C:0x3050] = struct.pack("<I", 0xD63F0000)
    registers = [0] * 33
    registers[29], registers[30], registers[31], registers[32] = STACK + 16, 0x2050 | signature, STACK, 0x1010
    stack = struct.pack("<4Q", 0, 0, 0, 0x3050 | signature)
    assert unwind(text, Capture(tuple(registers), stack, (0x1010,), 0)) == (0x1010, 0x204F, 0x304F)
    text.rules[0x1010] = UnwindRule(((0x8F, 0, 0),), {}, 30, False)  # a rule says that it is in the register
    assert unwind(text, Capture(tuple(registers), stack, (0x1010,), 0)) == (0x1010, 0x204F, 0x304F)


def test_the_expression_of_linkage_tables() -> None:
    """The expression that gcc has for .plt is rsp + 8 + ((rip & 15) >= 11) * 8."""
    expression = [
        (0x77, 8, 0),
        (0x80, 0, 0),
        (0x3F, 0, 0),
        (0x1A, 0, 0),
        (0x3B, 0, 0),
        (0x2A, 0, 0),
        (0x33, 0, 0),
    ]
    expression += [(0x24, 0, 0), (0x22, 0, 0)]
    for ip, expected in ((0x1006, 0x108), (0x100B, 0x110)):
        assert evaluate(expression, {7: 0x100, 16: ip}, 0, lambda address: 0) == expected
    for wrong in ([(0x22, 0, 0)], [(0x77, 0, 0)], [(0xF0, 0, 0)], []):
        with pytest.raises(UnknownValue):
            evaluate(wrong, {}, 0, lambda address: 0)
