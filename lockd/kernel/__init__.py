"""The kernel interface: BPF calls, maps, ring buffers and types. Only it handles BPF descriptors."""
