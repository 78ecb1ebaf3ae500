/* mmap_lock, K times: one thread changes the protection of MEGABYTES of pages, which holds the lock for
 * writing all the time (milliseconds), while another asks for it for reading: by mincore(), or with
 * FAULT=1 by touching the last of these pages, which is not there. The count of rwsem_read is not known
 * beforehand but measured: the calls, or faults, that were switched out. Each of the two has a processor of
 * its own, if there are two: on one they would take turns, and hardly ever meet. */
#include "workload.h"

static long k;
static bool fault;
static char *pages, *missing;
static struct waits waits;
static _Atomic long asked, finished;

static void *reader(void *unused)
{
    use_processor(true);
    unsigned char resident;
    for (long i = 1; i <= k; i++) {
        while (asked < i) /* awake, or it would come too late */
            ;
        spin(300);
        struct before b = before();
        if (fault)
            *(volatile char *)missing;
        else
            check(mincore(pages, 1, &resident), "mincore");
        after(&waits, b);
        finished = i;
    }
    pause(); /* for ever: a thread's exit asks for mmap_lock */
    return unused;
}

int main(int argc, char **argv)
{
    size_t size = arg(argc, argv, 2, 256) << 20, page = sysconf(_SC_PAGESIZE);
    k = arg(argc, argv, 1, 50);
    fault = arg(argc, argv, 3, 0);
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
        check(mprotect(pages, size, i % 2 ? PROT_READ : PROT_READ | PROT_WRITE), "mprotect");
        held += now_ns() - start;
        wait_until(&finished, i);
        check(madvise(missing, page, MADV_DONTNEED), "madvise");
    }
    say("{\"held_us\": %ld, \"kernel\": {", (long)(held / 1000));
    say_kernel("rwsem_read", &waits);
    say("}}");
    finish();
}
