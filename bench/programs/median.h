/* What the programs here share: the nanoseconds of one operation, as the median of many short runs, by the
 * processor time of all threads of the process: what else the host does then hardly matters. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Print the nanoseconds of one `operation`. A call of it returns how many of them were done meanwhile. Each
 * of `runs` runs does `times` of them or a few more. */
static void print_median(long (*operation)(void), int runs, int times)
{
    double *each = calloc(runs, sizeof *each);
    if (!each)
        abort();
    for (int run = 0; run < runs; run++) {
        long done = 0;
        int64_t began = now_ns();
        while (done < times)
            done += operation();
        each[run] = (double)(now_ns() - began) / done;
    }
    qsort(each, runs, sizeof *each, compare);
    printf("%.2f\n", each[runs / 2]);
    free(each);
}
