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
#define WORDS 64

/* The kernel keeps waiting threads in a table, by a hash of the word on which they wait. Processes with one
 * thread use a table that they share. A call takes a tenth longer if a thread waits for a word with the same
 * hash. So calls take turns with many words. */
static uint32_t words[WORDS];
static int op = FUTEX_WAKE_PRIVATE;

static long call(void)
{
    static unsigned turn;

    syscall(SYS_futex, &words[turn++ % WORDS], op, 1, NULL, NULL, 0);
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
