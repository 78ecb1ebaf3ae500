#!/bin/sh
# lockd as `make install` puts it on PATH: run by the system's own Python, since only that has bcc, and
# without modules from the directory one happens to be in (PYTHONSAFEPATH: Python 3.11 and later).
export PYTHONPATH=@LIB@ PYTHONSAFEPATH=1
exec /usr/bin/python3 -m lockd "$@"
