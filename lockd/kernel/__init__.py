"""The kernel interface: BPF system calls, maps, ring buffers and kernel types.

BPF system calls are defined here. Other folders keep descriptors of BPF objects, too, and pass them to
functions of this folder.
"""
