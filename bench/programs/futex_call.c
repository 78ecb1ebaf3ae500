/* What a futex call costs that does not block: FUTEX_WAKE of nobody, or FUTEX_WAIT for a value that is not
 * there (argument `wait`). Prints the nanoseconds of a call, the median of many short runs. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RUNS 301
#define CALLS 2000

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    static uint32_t word;
    static double each[RUNS];
    int op = argc > 1 && !strcmp(argv[1], "wait") ? FUTEX_WAIT_PRIVATE : FUTEX_WAKE_PRIVATE;
    for (int run = 0; run < RUNS; run++) {
        int64_t began = now_ns();
        for (int i = 0; i < CALLS; i++)
            syscall(SYS_futex, &word, op, 1, NULL, NULL, 0);
        each[run] = (double)(now_ns() - began) / CALLS;
    }
    qsort(each, RUNS, sizeof *each, compare);
    printf("%.2f\n", each[RUNS / 2]);
    return 0;
}
