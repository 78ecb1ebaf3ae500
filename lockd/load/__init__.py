"""The loader: it compiles and attaches the BPF programs that this host can run, and hands over their maps.

hooks.py lists the ways to do each part of the work, host.py says what this host offers, and choose.py
chooses. source.py and compile.py make the code, bpf_object.py and programs.py bring it into the kernel.
loader.py does all of this in a process of its own, which child.py starts.
"""
