/* A lock of C and one of Go, held by three functions each. The functions of the latter are in main.go. */
#include "holders.h"
#include "_cgo_export.h"
#include <pthread.h>

static pthread_mutex_t pthread = PTHREAD_MUTEX_INITIALIZER;

HELD_LOCK(pthread, pthread_mutex_lock(&pthread), pthread_mutex_unlock(&pthread))

void run_locks(int argc, char **argv)
{
    static const struct held_lock locks[] = {
        NAMED(pthread),
        {"sync", {syncShort, syncSome, syncLong}, syncAsk},
    };
    run_holders(argc, argv, locks, sizeof locks / sizeof *locks);
}
