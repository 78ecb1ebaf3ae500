/* Locks that nobody else wants: `mutex`, a pthread mutex taken and released without a system call; `pipe`, a
 * byte written to and read from a pipe, which takes the pipe's mutex in the kernel twice. A second argument
 * is the number of runs. Prints the nanoseconds of one pair of operations. */
#define _GNU_SOURCE
#include "median.h"
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define RUNS 301
#define PAIRS 2000

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int ends[2];

static long by_mutex(void)
{
    pthread_mutex_lock(&mutex);
    pthread_mutex_unlock(&mutex);
    return 1;
}

static long by_pipe(void)
{
    char byte = 0;
    if (write(ends[1], &byte, 1) != 1 || read(ends[0], &byte, 1) != 1)
        abort();
    return 1;
}

int main(int argc, char **argv)
{
    if (pipe(ends))
        return 1;
    print_median(argc > 1 && !strcmp(argv[1], "pipe") ? by_pipe : by_mutex, argc > 2 ? atoi(argv[2]) : RUNS,
                 PAIRS);
    return 0;
}
