/* K waits off the CPU for each reason, one phase after the other, each phase in a thread of its own:
 * sleep (nanosleep of 2 ms), pipe (a read answered 1 ms after the reader sleeps), poll (1 ms timeout),
 * lock (futex timeout of 1 ms), the last of each 100 ms, and disk (O_DIRECT reads of a file in DIR; left
 * out where DIR has no O_DIRECT). "phases" is per thread, and its times leave out the run queue; "offcpu" is
 * the whole process from the start byte on, so its sleeps include the coordination's, and "queued_us" that
 * the process spent on the run queue may be in their time. Not in it: the reads of stdin. A count is of
 * waits that blocked. */
#include "workload.h"
#include <poll.h>

enum { BLOCK = 4096, LAST_US = 100000 };

struct phase {
    const char *state, *reason;
    void (*once)(long i);
    struct waits waits;
    pid_t tid;
    _Atomic long asked, finished;
};

static long k;
static _Atomic int64_t queued; /* by threads that ended */
static int pipe_fd[2], disk_fd = -1;
static char *block;

static bool is_last(long i)
{
    return i == k - 1;
}

static void sleep_once(long i)
{
    nap(is_last(i) ? LAST_US : 2000);
}

static void pipe_once(long i)
{
    (void)i;
    char byte;
    check(read(pipe_fd[0], &byte, 1), "read pipe");
}

static void poll_once(long i)
{
    check(poll(&(struct pollfd){.fd = pipe_fd[0], .events = POLLIN}, 1, is_last(i) ? LAST_US / 1000 : 1),
          "poll");
}

static void futex_once(long i)
{
    static uint32_t two = 2;
    if (futex_wait_2(&two, is_last(i) ? LAST_US : 1000) != ETIMEDOUT)
        die("futex: no timeout");
}

static void disk_once(long i)
{
    check(pread(disk_fd, block, BLOCK, i * BLOCK), "read disk");
}

/* A file of K blocks, not in the page cache; false if DIR has no O_DIRECT (in memory). */
static bool make_file(const char *dir)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/offcpu_mix.%d", dir, getpid());
    disk_fd = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
    if (disk_fd < 0 && errno != EINVAL)
        die(path);
    unlink(path);
    if (disk_fd < 0)
        return false;
    for (long i = 0; i < k; i++)
        if (pwrite(disk_fd, block, BLOCK, i * BLOCK) != BLOCK)
            die("write disk");
    check(fsync(disk_fd), "fsync");
    return true;
}

static void *run(void *p)
{
    struct phase *me = p;
    for (long i = 0; i < k; i++) {
        if (me->once == pipe_once)
            wait_until(&me->asked, i + 1);
        int64_t was_queued = queued_ns();
        struct before b = before();
        me->once(i);
        b.ns += queued_ns() - was_queued;
        after(&me->waits, b);
    }
    queued += queued_ns();
    me->finished = 1;
    return NULL;
}

int main(int argc, char **argv)
{
    struct phase phases[] = {
        {.state = "interruptible", .reason = "sleep", .once = sleep_once},
        {.state = "interruptible", .reason = "pipe", .once = pipe_once},
        {.state = "interruptible", .reason = "poll", .once = poll_once},
        {.state = "interruptible", .reason = "lock", .once = futex_once},
        {.state = "uninterruptible", .reason = "disk", .once = disk_once},
    };
    const int count = sizeof phases / sizeof *phases;
    k = arg(argc, argv, 1, 50);
    errno = posix_memalign((void **)&block, BLOCK, BLOCK);
    if (errno)
        die("posix_memalign");
    memset(block, 'x', BLOCK);
    check(pipe2(pipe_fd, O_CLOEXEC), "pipe");
    int with_disk = make_file(argc > 2 ? argv[2] : ".");
    check(mlockall(MCL_CURRENT), "mlockall"); /* no page of the program is to be read meanwhile */
    ready();
    queued = -queued_ns();
    for (struct phase *p = phases; p < phases + count - !with_disk; p++) {
        p->tid = spawn(run, p);
        for (long i = 0; p->once == pipe_once && i < k; i++) {
            p->asked = i + 1;
            wait_asleep(p->tid, SYS_read);
            nap(is_last(i) ? LAST_US : 1000);
            check(write(pipe_fd[1], "x", 1), "write pipe");
        }
        wait_until(&p->finished, 1);
    }
    say("{\"phases\": [");
    for (struct phase *p = phases; p < phases + count - !with_disk; p++) {
        say("%s{\"tid\": %d, \"calls\": %ld, ", p == phases ? "" : ", ", p->tid, p->waits.waits);
        say_offcpu(p->state, p->reason, &p->waits);
        say("}");
    }
    say("], \"offcpu\": [{");
    say_offcpu("interruptible", "sleep", &naps);
    for (struct phase *p = phases + 1; p < phases + count - !with_disk; p++) {
        say("}, {");
        say_offcpu(p->state, p->reason, &p->waits);
    }
    say("}], \"queued_us\": %ld, \"futex\": {", (long)((queued + queued_ns()) / 1000));
    say_futex("lock", &phases[3].waits);
    say("}, \"wakes\": 0, \"errors\": {\"ETIMEDOUT\": %ld}}", k);
    finish();
}
