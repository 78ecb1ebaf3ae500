/* A priority-inheritance mutex is handed over K times: K waits of kind pi, each blocked for HOLD_US
 * or more, and 2 K unlocks that call the kernel (the word says "waiters" to the new owner too). Before, glibc
 * asks the kernel whether it has such mutexes, with an unlock of what is not locked: EPERM. */
#include "workload.h"

static pthread_mutex_t mutex;

static void lock(void *m)
{
    pthread_mutex_lock(m);
}

static void unlock(void *m)
{
    pthread_mutex_unlock(m);
}

int main(int argc, char **argv)
{
    struct handover h = {
        .lock = &mutex,
        .rounds = arg(argc, argv, 1, 100),
        .hold_us = arg(argc, argv, 2, 2000),
        .take = lock,
        .give = unlock,
        .ask = lock,
        .done = unlock,
    };
    pthread_mutexattr_t attr;
    ready();
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setprotocol(&attr, PTHREAD_PRIO_INHERIT);
    errno = pthread_mutex_init(&mutex, &attr);
    if (errno)
        die("pthread_mutex_init");
    hand_over(&h);
    say("{\"futex\": {");
    say_futex("pi", &h.waits);
    say("}, \"wakes\": %ld, \"errors\": {\"EPERM\": 1}}", 2 * h.rounds + 1);
    finish();
}
