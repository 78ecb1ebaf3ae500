"""The loader: compiles and attaches the BPF programs that this host can run, and hands over their maps."""
