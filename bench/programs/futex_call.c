/* What a futex call costs that does not block: FUTEX_WAKE of nobody, or FUTEX_WAIT for a value that is not
 * there (argument `wait`); or what a system call costs that does next to nothing (`other`). A second argument
 * is the number of runs. Prints the nanoseconds of a call. */
#define _GNU_SOURCE
#include "median.h"
#include <linux/futex.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RUNS 301
#define CALLS 2000

static uint32_t word;
static int op = FUTEX_WAKE_PRIVATE;

static long call(void)
{
    syscall(SYS_futex, &word, op, 1, NULL, NULL, 0);
    return 1;
}

static long other(void)
{
    syscall(SYS_getppid);
    return 1;
}

int main(int argc, char **argv)
{
    bool is_other = argc > 1 && !strcmp(argv[1], "other");

    if (argc > 1 && !strcmp(argv[1], "wait"))
        op = FUTEX_WAIT_PRIVATE;
    print_median(is_other ? other : call, argc > 2 ? atoi(argv[2]) : RUNS, CALLS);
    return 0;
}
