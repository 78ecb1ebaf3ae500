"""What lockd cannot see of some programs by itself, for who looks at their waits."""

from __future__ import annotations

JAVA, JAVA_UNKNOWN, GO = "java", "java_unknown", "go"
ADVICE = {
    JAVA: "its locks have the names of classes, as there is no perf map that names its code:"
    " jcmd PID Compiler.perfmap writes one (JDK 17 and later)",
    JAVA_UNKNOWN: "what its threads are parked for cannot be read (ZGC, compact object headers, a JDK before"
    " 17), so that a wait is of the kind that its thread's first one was of, for most of them cond",
    GO: "a goroutine that waits for a sync.Mutex makes no system call: cond is a thread without work. See"
    " lockd_go_mutex_wait_seconds_total, if it is there; else the program's own mutex profile",
}
"""What somebody who looks at a process's waits has to know, or do: by value of the label `advice`."""
