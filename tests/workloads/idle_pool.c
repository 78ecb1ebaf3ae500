/* N workers of a pool idle for SECONDS on one condition variable, then get one task each: N waits of
 * kind cond, no wait of kind lock. Workers start and are woken one by one, so the mutex is never
 * contended. 2 N wakes: each signal, and each unlock after a wait, because glibc takes the mutex back as
 * if others waited for it. */
#include "workload.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static long tasks;
static _Atomic long finished;
static struct waits waits;

static void *worker(void *unused)
{
    pthread_mutex_lock(&mutex);
    while (!tasks) {
        struct before b = before();
        pthread_cond_wait(&cond, &mutex);
        after(&waits, b);
    }
    tasks--;
    pthread_mutex_unlock(&mutex);
    spin(200);
    finished++;
    return unused;
}

int main(int argc, char **argv)
{
    long n = arg(argc, argv, 1, 8), seconds = arg(argc, argv, 2, 5);
    ready();
    for (long i = 0; i < n; i++)
        wait_asleep(spawn(worker, NULL), SYS_futex);
    nap(seconds * 1000000);
    for (long i = 1; i <= n; i++) {
        pthread_mutex_lock(&mutex);
        tasks++;
        pthread_mutex_unlock(&mutex);
        pthread_cond_signal(&cond);
        wait_until(&finished, i);
    }
    say("{\"futex\": {");
    say_futex("cond", &waits);
    say("}, \"wakes\": %ld, \"errors\": {}}", 2 * n);
    finish();
}
