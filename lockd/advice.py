"""Advice about the programs whose waits lockd cannot fully see, for people who look at these waits.

The namer finds the advice for a process; metrics and views show it.
"""

from __future__ import annotations

JAVA, JAVA_UNKNOWN, GO = "java", "java_unknown", "go"
ADVICE = {
    JAVA: "no perf map names the code of this Java process, so that its locks have the names of classes:"
    " jcmd PID Compiler.perfmap writes a perf map (JDK 17 and later)",
    JAVA_UNKNOWN: "lockd cannot read what the threads of this Java process are parked for (ZGC, compact"
    " object headers, a JDK before 17): each wait has the kind of an earlier one of its thread, mostly cond",
    GO: "a goroutine that waits for a sync.Mutex makes no system call: cond is a thread without work. See"
    " lockd_go_mutex_wait_seconds_total if the process has it, else the program's own mutex profile",
}
"""What to know, or to do, about the waits of a process, by value of the label `advice`."""
