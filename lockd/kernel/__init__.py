"""The kernel interface: BPF system calls, maps, ring buffers and kernel types.

Only this room and `load` handle descriptors of BPF objects.
"""
