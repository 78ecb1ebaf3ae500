/* The locks of POSIX threads, held by three functions. Also built with musl. */
#include "holders.h"
#include <pthread.h>

static pthread_mutex_t normal = PTHREAD_MUTEX_INITIALIZER, recursive, pi;
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;

HELD_LOCK(normal, pthread_mutex_lock(&normal), pthread_mutex_unlock(&normal))
HELD_LOCK(recursive, pthread_mutex_lock(&recursive), pthread_mutex_unlock(&recursive))
HELD_LOCK(pi, pthread_mutex_lock(&pi), pthread_mutex_unlock(&pi))
HELD_LOCK(rwlock, pthread_rwlock_wrlock(&rwlock), pthread_rwlock_unlock(&rwlock))

int main(int argc, char **argv)
{
    static const struct held_lock locks[] = {NAMED(normal), NAMED(recursive), NAMED(pi), NAMED(rwlock)};
    pthread_mutexattr_t attributes;

    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&recursive, &attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_NORMAL);
    pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT);
    pthread_mutex_init(&pi, &attributes);
    run_holders(argc, argv, locks, sizeof locks / sizeof *locks);
}
