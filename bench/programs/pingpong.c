/* Two threads on one processor that wake each other, by futexes (`futex`) or by a byte in a pipe (`pipe`). A
 * second argument is the number of runs. Prints the nanoseconds of a round trip: two waits that block, and
 * two wake-ups. */
#define _GNU_SOURCE
#include "median.h"
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RUNS 201
#define TRIPS 300

static _Atomic uint32_t turn[2];
static int ends[2][2];
static int runs = RUNS;
static void (*play)(int me);

static void by_futex(int me)
{
    while (!atomic_exchange(&turn[me], 0))
        syscall(SYS_futex, &turn[me], FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
    atomic_store(&turn[!me], 1);
    syscall(SYS_futex, &turn[!me], FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void by_pipe(int me)
{
    char byte = 0;
    if (read(ends[me][0], &byte, 1) != 1 || write(ends[!me][1], &byte, 1) != 1)
        abort();
}

static long first(void)
{
    play(0);
    return 1;
}

static void *second(void *unused)
{
    for (long i = 0; i < (long)runs * TRIPS; i++)
        play(1);
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one); /* the thread inherits it */
    play = argc > 1 && !strcmp(argv[1], "pipe") ? by_pipe : by_futex;
    runs = argc > 2 ? atoi(argv[2]) : RUNS;
    turn[0] = 1;
    if (pipe(ends[0]) || pipe(ends[1]) || write(ends[0][1], "", 1) != 1)
        return 1;
    pthread_create(&thread, NULL, second, NULL);
    print_median(first, runs, TRIPS);
    pthread_join(thread, NULL);
    return 0;
}
