/* Busy, but never stuck: THREADS threads take nested locks, always in one order, among them recursive and
 * read-write ones, for SECONDS. No moment of it is a deadlock.
 * `names_live [SECONDS=10] [THREADS=16] [HELD_US=20]` */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { MUTEXES = 6, DEEPEST = 4 };

static pthread_mutex_t mutexes[MUTEXES];
static pthread_rwlock_t rwlocks[2] = {PTHREAD_RWLOCK_INITIALIZER, PTHREAD_RWLOCK_INITIALIZER};
static _Atomic bool stop;
static _Atomic long rounds;
static long held_us;

static void hold(void)
{
    struct timespec time = {0, held_us * 1000};
    nanosleep(&time, NULL);
}

/* The even ones are recursive, one has priority inheritance. */
static void make_mutexes(void)
{
    for (int i = 0; i < MUTEXES; i++) {
        pthread_mutexattr_t attr;
        pthread_mutexattr_init(&attr);
        pthread_mutexattr_settype(&attr, i % 2 ? PTHREAD_MUTEX_NORMAL : PTHREAD_MUTEX_RECURSIVE);
        pthread_mutexattr_setprotocol(&attr, i == 3 ? PTHREAD_PRIO_INHERIT : PTHREAD_PRIO_NONE);
        pthread_mutex_init(&mutexes[i], &attr);
    }
}

/* Some of the mutexes, from the first to the last, and inside of them a read-write lock. */
static void once_through(unsigned *seed)
{
    int taken[DEEPEST], depth = 0;
    for (int i = rand_r(seed) % 2; i < MUTEXES && depth < DEEPEST; i += 1 + rand_r(seed) % 3) {
        pthread_mutex_lock(&mutexes[i]);
        if (i % 2 == 0) {
            pthread_mutex_lock(&mutexes[i]);
            pthread_mutex_unlock(&mutexes[i]);
        }
        taken[depth++] = i;
    }
    pthread_rwlock_t *rwlock = &rwlocks[rand_r(seed) % 2];
    if (rand_r(seed) % 4)
        pthread_rwlock_rdlock(rwlock);
    else
        pthread_rwlock_wrlock(rwlock);
    hold();
    pthread_rwlock_unlock(rwlock);
    while (depth)
        pthread_mutex_unlock(&mutexes[taken[--depth]]);
}

static void *run(void *p)
{
    unsigned seed = (unsigned)(size_t)p;
    while (!stop) {
        once_through(&seed);
        rounds++;
    }
    return NULL;
}

static long arg(int argc, char **argv, int at, long otherwise)
{
    return argc > at ? atol(argv[at]) : otherwise;
}

int main(int argc, char **argv)
{
    long seconds = arg(argc, argv, 1, 10), threads = arg(argc, argv, 2, 16);
    held_us = arg(argc, argv, 3, 20);
    pthread_t *all = calloc(threads, sizeof *all);
    make_mutexes();
    for (long i = 0; i < threads; i++)
        pthread_create(&all[i], NULL, run, (void *)(i + 1));
    sleep(seconds);
    stop = true;
    for (long i = 0; i < threads; i++)
        pthread_join(all[i], NULL);
    printf("{\"rounds\": %ld}\n", rounds);
}
