"""The kernel interface: BPF system calls, maps, ring buffers and kernel types.

BPF system calls are defined here. Other folders hold descriptors too, and use them by functions of this one.
"""
