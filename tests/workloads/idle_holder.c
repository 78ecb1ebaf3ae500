/* mmap_lock, held by a thread that gets no processor, for SECONDS: it changes the protection of MEGABYTES of
 * pages again and again at idle priority, on a processor that another thread takes. READERS threads ask for
 * the lock by mincore() meanwhile, on another processor if there is one. Waits rwsem_read of any length. */
#include "workload.h"

static char *pages;
static struct waits waits;
static _Atomic bool stop;

static void *take_processor(void *unused)
{
    struct sched_param ordinary = {0};
    check(sched_setscheduler(0, SCHED_OTHER, &ordinary), "sched_setscheduler"); /* whatever started it */
    use_processor(true);
    while (!stop)
        spin(1000);
    pause(); /* for ever: a thread's exit asks for mmap_lock */
    return unused;
}

static void *reader(void *unused)
{
    unsigned char resident;
    use_processor(false);
    while (!stop) {
        nap(10000);
        struct before b = before();
        check(mincore(pages, 1, &resident), "mincore");
        after(&waits, b);
    }
    pause();
    return unused;
}

int main(int argc, char **argv)
{
    long seconds = arg(argc, argv, 1, 10), readers = arg(argc, argv, 3, 4);
    size_t size = arg(argc, argv, 2, 256) << 20;
    struct sched_param idle = {0};
    pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        die("mmap");
    madvise(pages, size, MADV_NOHUGEPAGE);
    memset(pages, 1, size);
    ready();
    for (long i = 0; i < readers; i++)
        spawn(reader, NULL);
    spawn(take_processor, NULL);
    use_processor(true);
    check(sched_setscheduler(0, SCHED_IDLE, &idle), "sched_setscheduler");
    int64_t end = now_ns() + seconds * 1000000000LL;
    for (long i = 1; now_ns() < end; i++)
        check(mprotect(pages, size, i % 2 ? PROT_READ : PROT_READ | PROT_WRITE), "mprotect");
    stop = true;
    check(sched_setscheduler(0, SCHED_OTHER, &idle), "sched_setscheduler");
    say("{\"kernel\": {");
    say_kernel("rwsem_read", &waits);
    say("}}");
    finish();
}
