/* Eight threads on one processor that want one pthread mutex (argument `mutex`). Its holder gives the
 * processor to the others, so that they find it taken and wait. A second argument is the number of runs.
 * Prints the nanoseconds that all threads together take for one pair of lock and unlock. Nearly every pair
 * has a wait that blocks, and a wake-up. */
#define _GNU_SOURCE
#include "median.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define THREADS 8
#define RUNS 101
#define PAIRS 1000

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic long done; /* pairs, by all threads */
static _Atomic int is_over;

static void take_it(void)
{
    pthread_mutex_lock(&mutex);
    done++;
    sched_yield();
    pthread_mutex_unlock(&mutex);
}

/* Return how many pairs all threads have done meanwhile. */
static long by_all(void)
{
    long before = done;
    take_it();
    return done - before;
}

static void *other(void *unused)
{
    while (!is_over)
        take_it();
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS - 1];
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one); /* the threads inherit it */
    for (int i = 0; i < THREADS - 1; i++)
        pthread_create(&threads[i], NULL, other, NULL);
    print_median(by_all, argc > 2 ? atoi(argv[2]) : RUNS, PAIRS);
    is_over = 1;
    for (int i = 0; i < THREADS - 1; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
