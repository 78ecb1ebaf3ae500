"""What a process of lockd does to itself: its imports, privileges, system calls, memory and clocks."""
