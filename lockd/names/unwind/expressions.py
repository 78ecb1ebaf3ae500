"""DWARF expressions: the operations that unwinding rules use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lockd.names.objects.elfutils import Operation

WORD = 2**64 - 1
SIGN = 1 << 63

ADDR, DEREF, CONST1U, DUP, DROP, OVER, SWAP = 0x03, 0x06, 0x08, 0x12, 0x13, 0x14, 0x16
CONSTS = 0x11
AND, MINUS, MUL, NEG, NOT, OR, PLUS, PLUS_UCONST = 0x1A, 0x1C, 0x1E, 0x1F, 0x20, 0x21, 0x22, 0x23
SHL, SHR, SHRA, XOR = 0x24, 0x25, 0x26, 0x27
EQ, GE, GT, LE, LT, NE = 0x29, 0x2A, 0x2B, 0x2C, 0x2D, 0x2E
LIT0, REG0, BREG0, REGX, BREGX, NOP = 0x30, 0x50, 0x70, 0x90, 0x92, 0x96
CALL_FRAME_CFA, STACK_VALUE = 0x9C, 0x9F

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


class UnknownValue(Exception):
    """An expression needs a register or memory that was not captured, or an operation that lockd lacks."""


def evaluate(
    expression: Sequence[Operation],
    registers: Mapping[int, int],
    cfa: int,
    read: Callable[[int], int],
    is_location: bool = False,
) -> int:
    """The value of a DWARF expression: 64 bits, unsigned.

    With `is_location` the expression gives an address, and the value is the word at this address, unless the
    expression ends in DW_OP_stack_value or names a register. `registers` has values by DWARF number, and
    `cfa` is the canonical frame address. `read` returns the word at an address. Raises UnknownValue if a
    register or a word is missing, or if an operation is not supported.
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
        raise UnknownValue(f"{expression} needs a register or a value that is not known") from None


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
        raise UnknownValue(f"the DWARF operation {code:#x} is not supported")


def _signed(value: int) -> int:
    return value - 2**64 if value & SIGN else value
