/* Locks that nobody else wants. Prints the nanoseconds of one pair of operations, the median of many short
 * runs: `mutex`, a pthread mutex taken and released without a system call; `pipe`, a byte written to and read
 * from a pipe, which takes the pipe's kernel mutex twice. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define RUNS 301
#define PAIRS 2000

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int ends[2];

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void by_mutex(void)
{
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
}

static void by_pipe(void)
{
    char byte = 0;
    if (write(ends[1], &byte, 1) != 1 || read(ends[0], &byte, 1) != 1)
        abort();
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    static double each[RUNS];
    void (*pair)(void) = argc > 1 && !strcmp(argv[1], "pipe") ? by_pipe : by_mutex;
    if (pipe(ends))
        return 1;
    for (int run = 0; run < RUNS; run++) {
        int64_t began = now_ns();
        for (int i = 0; i < PAIRS; i++)
            pair();
        each[run] = (double)(now_ns() - began) / PAIRS;
    }
    qsort(each, RUNS, sizeof *each, compare);
    printf("%.2f\n", each[RUNS / 2]);
    return 0;
}
