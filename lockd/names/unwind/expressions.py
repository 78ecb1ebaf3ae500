"""DWARF expressions, as far as rules for unwinding use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lockd.names.objects.libdw import Operation

WORD = 2**64 - 1
SIGN = 1 << 63

ADDR, DEREF, CONST1U, DUP, DROP, OVER, SWAP = 0x03, 0x06, 0x08, 0x12, 0x13, 0x14, 0x16
CONSTS = 0x11
AND, MINUS, MUL, NEG, NOT, OR, PLUS, PLUS_UCONST = 0x1A, 0x1C, 0x1E, 0x1F, 0x20, 0x21, 0x22, 0x23
SHL, SHR, SHRA, XOR = 0x24, 0x25, 0x26, 0x27
EQ, GE, GT, LE, LT, NE = 0x29, 0x2A, 0x2B, 0x2C, 0x2D, 0x2E
LIT0, REG0, BREG0, REGX, BREGX, NOP, CALL_FRAME_CFA, STACK_VALUE = (
    0x30,
    0x50,
    0x70,
    0x90,
    0x92,
    0x96,
    0x9C,
    0x9F,
)

_BINARY: dict[int, Callable[[int, int], int]] = {
    AND: lambda a, b: a & b,
    OR: lambda a, b: a | b,
    XOR: lambda a, b: a ^ b,
    PLUS: lambda a, b: a + b,
    MINUS: lambda a, b: a - b,
    MUL: lambda a, b: a * b,
    SHL: lambda a, b: a << b if b < 64 else 0,
    SHR: lambda a, b: a >> b,
    SHRA: lambda a, b: _signed(a) >> b,
    EQ: lambda a, b: a == b,
    NE: lambda a, b: a != b,
    GE: lambda a, b: _signed(a) >= _signed(b),
    GT: lambda a, b: _signed(a) > _signed(b),
    LE: lambda a, b: _signed(a) <= _signed(b),
    LT: lambda a, b: _signed(a) < _signed(b),
}


class Unknown(Exception):
    """An expression needs what was not captured, or what is not known here."""


def evaluate(
    expression: Sequence[Operation],
    registers: Mapping[int, int],
    cfa: int,
    read: Callable[[int], int],
    is_location: bool = False,
) -> int:
    """The value of an expression; of a location, unless it ends in the value itself, the word that is there.

    `read` gives a word of memory. Unknown if anything of it cannot be had.
    """
    stack: list[int] = []
    try:
        for code, operand, other in expression:
            if code == STACK_VALUE:
                return stack[-1] & WORD
            if REG0 <= code < REG0 + 32 or code == REGX:
                return registers[operand if code == REGX else code - REG0]
            _step(stack, code, operand, other, registers, cfa, read)
        return read(stack[-1]) if is_location else stack[-1]
    except (KeyError, IndexError):
        raise Unknown(f"{expression} needs what is not known") from None


def _step(
    stack: list[int],
    code: int,
    operand: int,
    other: int,
    registers: Mapping[int, int],
    cfa: int,
    read: Callable[[int], int],
) -> None:
    if BREG0 <= code < BREG0 + 32:
        stack.append((registers[code - BREG0] + operand) & WORD)
    elif code == BREGX:
        stack.append((registers[operand] + other) & WORD)
    elif code == CALL_FRAME_CFA:
        stack.append(cfa)
    elif LIT0 <= code < LIT0 + 32:
        stack.append(code - LIT0)
    elif code == ADDR or CONST1U <= code <= CONSTS:
        stack.append(operand & WORD)
    elif code == PLUS_UCONST:
        stack.append((stack.pop() + operand) & WORD)
    elif code == DEREF:
        stack.append(read(stack.pop()))
    elif code in _BINARY:
        second, first = stack.pop(), stack.pop()
        stack.append(int(_BINARY[code](first, second)) & WORD)
    elif code in (NEG, NOT):
        stack.append((-stack.pop() if code == NEG else ~stack.pop()) & WORD)
    elif code in (DUP, OVER):
        stack.append(stack[-1 if code == DUP else -2])
    elif code == DROP:
        stack.pop()
    elif code == SWAP:
        stack[-1], stack[-2] = stack[-2], stack[-1]
    elif code != NOP:
        raise Unknown(f"the operation {code:#x} is not known here")


def _signed(value: int) -> int:
    return value - 2**64 if value & SIGN else value
