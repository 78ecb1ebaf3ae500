#!/bin/sh
# lockd as `make install` puts it on PATH: run by the system's own Python, since only that has bcc, and
# without modules from the directory one happens to be in.
exec /usr/bin/python3 -I @LIB@/lockd/process/isolation.py lockd "$@"
