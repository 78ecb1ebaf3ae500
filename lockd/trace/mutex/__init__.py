"""`lockd trace mutex`: how long threads wait for pthread mutexes and hold them, measured by uprobes."""
