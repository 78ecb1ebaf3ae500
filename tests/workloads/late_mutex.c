/* CONDS threads wait for work, each on a condition variable of its own, from the start on; when there is a
 * second byte THREADS threads fight for one mutex, `late_mutex`, for SECONDS: waits of kind lock on it alone.
 * One call may wait several times, so only their number of calls that blocked is known; their sum is that of
 * all waits. */
#include "workload.h"

#define HELD_US 500
#define MOST 1000

static struct own {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
} own[MOST]; /* a global variable, so that each place in it has a name */
static pthread_mutex_t late_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct waits locks;
static _Atomic long stop, finished;

static void *wait_for_work(void *mine)
{
    struct own *own = mine;

    pthread_mutex_lock(&own->mutex);
    while (!stop)
        pthread_cond_wait(&own->cond, &own->mutex);
    return NULL;
}

static void *fight(void *unused)
{
    while (!stop) {
        struct before b = before();
        pthread_mutex_lock(&late_mutex);
        after(&locks, b);
        nap(HELD_US);
        pthread_mutex_unlock(&late_mutex);
    }
    finished++;
    return unused;
}

int main(int argc, char **argv)
{
    long conds = arg(argc, argv, 1, 60), threads = arg(argc, argv, 2, 8);
    long seconds = arg(argc, argv, 3, 10);

    ready();
    for (long i = 0; i < conds && i < MOST; i++) {
        pthread_mutex_init(&own[i].mutex, NULL);
        pthread_cond_init(&own[i].cond, NULL);
        wait_asleep(spawn(wait_for_work, &own[i]), SYS_futex);
    }
    wait_for_byte();
    for (long i = 0; i < threads; i++)
        spawn(fight, NULL);
    nap(seconds * 1000000);
    stop = 1;
    wait_until(&finished, threads);
    say("{\"addr\": \"%p\", \"futex\": {", (void *)&late_mutex);
    say_futex("lock", &locks);
    say("}}");
    finish();
}
