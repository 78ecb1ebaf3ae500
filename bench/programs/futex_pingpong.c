/* Two threads on one processor that wake each other by futexes. Prints the nanoseconds of a round trip, that
 * is two waits that block and two wakes, the median of many short runs. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RUNS 201
#define TRIPS 300

static _Atomic uint32_t turn[2];

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void play(int me)
{
    while (!atomic_exchange(&turn[me], 0))
        syscall(SYS_futex, &turn[me], FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
    atomic_store(&turn[!me], 1);
    syscall(SYS_futex, &turn[!me], FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void *other(void *unused)
{
    for (long i = 0; i < (long)RUNS * TRIPS; i++)
        play(1);
    return unused;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(void)
{
    static double each[RUNS];
    pthread_t thread;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one); /* the thread inherits it */
    pthread_create(&thread, NULL, other, NULL);
    turn[0] = 1;
    for (int run = 0; run < RUNS; run++) {
        int64_t began = now_ns();
        for (int i = 0; i < TRIPS; i++)
            play(0);
        each[run] = (double)(now_ns() - began) / TRIPS;
    }
    pthread_join(thread, NULL);
    qsort(each, RUNS, sizeof *each, compare);
    printf("%.1f\n", each[RUNS / 2]);
    return 0;
}
