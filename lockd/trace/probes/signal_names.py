"""Names of signals, of what is said to have caused them, and of what became of them."""

from __future__ import annotations

import signal
from difflib import get_close_matches

FIRST_REALTIME, LAST = 34, 64
"""Of the C library, which keeps 32 and 33 for itself."""
CODES = {
    0: "SI_USER", 0x80: "SI_KERNEL", -1: "SI_QUEUE", -2: "SI_TIMER", -3: "SI_MESGQ", -4: "SI_ASYNCIO",
    -5: "SI_SIGIO", -6: "SI_TKILL", -7: "SI_DETHREAD", -60: "SI_ASYNCNL",
}  # fmt: skip
"""Of any signal; see sigaction(2)."""
CODES_OF = {
    "SIGILL": "ILL_ ILLOPC ILLOPN ILLADR ILLTRP PRVOPC PRVREG COPROC BADSTK BADIADDR",
    "SIGFPE": "FPE_ INTDIV INTOVF FLTDIV FLTOVF FLTUND FLTRES FLTINV FLTSUB",
    "SIGSEGV": "SEGV_ MAPERR ACCERR BNDERR PKUERR ACCADI ADIDERR ADIPERR MTEAERR MTESERR CPERR",
    "SIGBUS": "BUS_ ADRALN ADRERR OBJERR MCEERR_AR MCEERR_AO",
    "SIGTRAP": "TRAP_ BRKPT TRACE BRANCH HWBKPT UNK PERF",
    "SIGCHLD": "CLD_ EXITED KILLED DUMPED TRAPPED STOPPED CONTINUED",
    "SIGIO": "POLL_ IN OUT MSG ERR PRI HUP",
    "SIGSYS": "SYS_ SECCOMP USER_DISPATCH",
}
"""Of one: how their names begin, then the rest of each from number 1 on."""
BY_PROCESS = ("SI_USER", "SI_QUEUE", "SI_MESGQ", "SI_TKILL")
"""Codes of what the running process sends; all others are the kernel's, but for those of SIGCHLD, which the
kernel sends in the name of a child."""
RESULTS = ("delivered", "ignored", "already pending", "queue full", "delivered without info")
"""enum of include/trace/events/signal.h. What is delivered waits for as long as the receiver blocks it."""
NEAREST = 3


def name_of(number: int) -> str:
    """SIGTERM, SIGRTMIN+3; the number alone of one without a name."""
    if FIRST_REALTIME <= number <= LAST:
        return f"SIGRTMIN+{number - FIRST_REALTIME}" if number > FIRST_REALTIME else "SIGRTMIN"
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def number_of(name: str) -> int:
    """Of SIGTERM, TERM, sigterm, RTMIN+3 or 15. Raises ValueError with the nearest names."""
    known = {name_of(number): number for number in range(1, LAST + 1)}
    known |= {"SIGRTMAX": LAST, "SIGPOLL": signal.SIGPOLL, "SIGIOT": signal.SIGIOT}
    wanted = name.strip().upper()
    for one in (wanted, f"SIG{wanted}"):
        if one in known:
            return known[one]
    if wanted.isdecimal() and 1 <= int(wanted) <= LAST:
        return int(wanted)
    nearest = get_close_matches(f"SIG{wanted.removeprefix('SIG')}", known, NEAREST)
    hint = f"; did you mean {', '.join(nearest)}?" if nearest else ""
    raise ValueError(f"{name!r} is no signal{hint}")


def code_name(number: int, code: int) -> str:
    """What caused a signal: SI_USER, SEGV_MAPERR; the number of what has no name."""
    if code in CODES:
        return CODES[code]
    beginning, *names = CODES_OF.get(name_of(number), "?").split()
    return f"{beginning}{names[code - 1]}" if 1 <= code <= len(names) else str(code)


def is_by_process(number: int, code: int) -> bool:
    """Whether the process that ran has sent it, or is the child that it is about."""
    return code_name(number, code) in BY_PROCESS or (
        number == signal.SIGCHLD and code > 0 and code not in CODES
    )


def result_name(result: int) -> str:
    return RESULTS[result] if 0 <= result < len(RESULTS) else str(result)
