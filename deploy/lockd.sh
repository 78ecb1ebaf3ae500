#!/bin/sh
# The command lockd, which `make install` puts on PATH. It runs lockd with the system's own Python, as only that has
# bcc, and with -I, so that no modules are imported from the current directory.
exec /usr/bin/python3 -I @LIB@/lockd/process/isolation.py lockd "$@"
