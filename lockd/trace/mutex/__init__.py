"""`lockd trace mutex`: how long pthread mutexes are waited for and held, by uprobes."""
