/* mmap_lock, K times: one thread changes the protection of MEGABYTES of pages, which holds the lock for
 * writing all the time (milliseconds), while another asks for it for reading: by mincore(), or with
 * FAULT=1 by touching the last of these pages, which is not there. With FAULT=2 it does these in turns, and
 * for mincore() the lock is held for a quarter of the time. The count of rwsem_read is not known beforehand
 * but measured: the calls, or faults, that were switched out. "mincore_us" and "fault_us" are the two parts
 * of their time. Each of the two threads has a processor of its own, if there are two: on one they would take
 * turns, and hardly ever meet. */
#include "workload.h"

static long k;
static enum { MINCORE, FAULT, IN_TURNS } asks_by;
static char *pages, *missing;
static struct waits waits;
static int64_t faults_ns;
static _Atomic long asked, finished;

static bool is_short(long i)
{
    return asks_by == IN_TURNS && i % 2;
}

static void *reader(void *unused)
{
    use_processor(true);
    unsigned char resident;
    for (long i = 1; i <= k; i++) {
        while (asked < i) /* awake, or it would come too late */
            ;
        spin(300);
        int64_t sum_ns = waits.sum_ns;
        bool faults = asks_by != MINCORE && !is_short(i);
        struct before b = before();
        if (faults)
            *(volatile char *)missing;
        else
            check(mincore(pages, 1, &resident), "mincore");
        after(&waits, b);
        if (faults)
            faults_ns += waits.sum_ns - sum_ns;
        finished = i;
    }
    pause(); /* for ever: a thread's exit asks for mmap_lock */
    return unused;
}

int main(int argc, char **argv)
{
    size_t size = arg(argc, argv, 2, 256) << 20, page = sysconf(_SC_PAGESIZE);
    k = arg(argc, argv, 1, 50);
    asks_by = arg(argc, argv, 3, MINCORE);
    pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        die("mmap");
    madvise(pages, size, MADV_NOHUGEPAGE);
    missing = pages + size - page;
    memset(pages, 1, size - page);
    ready();
    spawn(reader, NULL);
    use_processor(false);
    int64_t held = 0;
    for (long i = 1; i <= k; i++) {
        int64_t start = now_ns();
        asked = i;
        /* In turns, a part of the pages changes first, and then the others. */
        bool is_closed = asks_by == IN_TURNS ? i % 4 == 1 || i % 4 == 2 : i % 2;
        size_t part = is_short(i) ? size / 4 : size;
        check(mprotect(pages, part, is_closed ? PROT_READ : PROT_READ | PROT_WRITE), "mprotect");
        held += now_ns() - start;
        wait_until(&finished, i);
        check(madvise(missing, page, MADV_DONTNEED), "madvise");
    }
    say("{\"held_us\": %ld, \"kernel\": {", (long)(held / 1000));
    say_kernel("rwsem_read", &waits);
    say("}, \"mincore_us\": %ld, \"fault_us\": %ld}", (long)((waits.sum_ns - faults_ns) / 1000),
        (long)(faults_ns / 1000));
    finish();
}
