"""The kernel interface: BPF system calls, maps, ring buffers and kernel types.

The functions that make BPF system calls are declared here. Other folders, too, keep descriptors of BPF
objects, and pass them to functions of this folder.
"""
