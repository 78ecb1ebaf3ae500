/* K waits in each of some functions, one place after the other, each in a thread of its own and with callers
 * that have no frame pointers (see Makefile): inner_sleep called by middle_sleep called by outer_sleep
 * (nanosleep of SLEEP_US), read_here (a pipe, answered half of that after the reader sleeps, by write_here in
 * the main thread), fork_here (uninterruptible: a vfork, whose child ends after half of that). "places" has
 * the waits of each, without the time on the run queue. The thread "older" has been blocked in older_wait
 * since before the start byte, and "late" is blocked in late_wait since after it; both stay so. */
#include "workload.h"

static long k, sleep_us;
static int pipe_fd[2], silent_fd[2];
static _Atomic int64_t queued; /* by threads that ended */

struct place {
    const char *state, *reason, *function;
    void (*once)(struct waits *);
    struct waits waits;
    pid_t tid;
    _Atomic long asked, finished;
};

#define NOINLINE __attribute__((noinline, noclone))
static volatile long count; /* so that no call is the last thing that its caller does */

/* The clocks before a wait. The time of a wait on the run queue is left out. */
struct measured {
    struct before before;
    int64_t queued;
};

static struct measured begin(void)
{
    int64_t was_queued = queued_ns();
    return (struct measured){before(), was_queued};
}

static void end(struct waits *waits, struct measured m)
{
    m.before.ns += queued_ns() - m.queued;
    after(waits, m.before);
}

NOINLINE static void inner_sleep(struct waits *waits)
{
    struct measured m = begin();
    nanosleep(&(struct timespec){.tv_nsec = sleep_us * 1000}, NULL);
    end(waits, m);
    count++;
}

NOINLINE static void middle_sleep(struct waits *waits)
{
    inner_sleep(waits);
    count++;
}

NOINLINE static void outer_sleep(struct waits *waits)
{
    middle_sleep(waits);
    count++;
}

NOINLINE static void read_here(struct waits *waits)
{
    char byte;
    struct measured m = begin();
    check(read(pipe_fd[0], &byte, 1), "read pipe");
    end(waits, m);
    count++;
}

NOINLINE static void write_here(void)
{
    check(write(pipe_fd[1], "x", 1), "write pipe");
    count++;
}

NOINLINE static void fork_here(struct waits *waits)
{
    struct measured m = begin();
    pid_t pid = vfork();
    if (!pid) {
        syscall(SYS_nanosleep, &(struct timespec){.tv_nsec = sleep_us * 500}, NULL);
        _exit(0);
    }
    check(pid, "vfork");
    end(waits, m);
    check(waitpid(pid, NULL, 0), "waitpid");
    count++;
}

NOINLINE static void older_wait(void)
{
    char byte;
    check(read(silent_fd[0], &byte, 1), "read silent pipe");
    count++;
}

NOINLINE static void late_wait(void)
{
    char byte;
    check(read(silent_fd[0], &byte, 1), "read silent pipe");
    count += 2; /* 2, or else the compiler would merge it with older_wait() */
}

static void *older(void *p)
{
    older_wait();
    return p;
}

static void *late(void *p)
{
    late_wait();
    return p;
}

static void *run(void *p)
{
    struct place *me = p;
    for (long i = 0; i < k; i++) {
        if (me->once == read_here)
            wait_until(&me->asked, i + 1);
        me->once(&me->waits);
    }
    queued += queued_ns();
    me->finished = 1;
    return NULL;
}

int main(int argc, char **argv)
{
    struct place places[] = {
        {.state = "interruptible", .reason = "sleep", .function = "inner_sleep", .once = outer_sleep},
        {.state = "interruptible", .reason = "pipe", .function = "read_here", .once = read_here},
        {.state = "uninterruptible", .reason = "child", .function = "fork_here", .once = fork_here},
    };
    const int number = sizeof places / sizeof *places;
    k = arg(argc, argv, 1, 50);
    sleep_us = arg(argc, argv, 2, 2000); /* below 1 s */
    check(pipe2(pipe_fd, O_CLOEXEC), "pipe");
    check(pipe2(silent_fd, O_CLOEXEC), "pipe");
    pid_t older_tid = spawn(older, NULL);
    wait_asleep(older_tid, SYS_read);
    ready();
    pid_t late_tid = spawn(late, NULL);
    wait_asleep(late_tid, SYS_read);
    for (struct place *p = places; p < places + number; p++) {
        p->tid = spawn(run, p);
        for (long i = 0; p->once == read_here && i < k; i++) {
            p->asked = i + 1;
            wait_asleep(p->tid, SYS_read);
            nap(sleep_us / 2);
            write_here();
        }
        wait_until(&p->finished, 1);
    }
    say("{\"older\": %d, \"late\": %d, \"queued_us\": %ld, \"places\": [", older_tid, late_tid,
        (long)(queued / 1000));
    for (struct place *p = places; p < places + number; p++) {
        say("%s{\"function\": \"%s\", \"tid\": %d, ", p == places ? "" : ", ", p->function, p->tid);
        say_offcpu(p->state, p->reason, &p->waits);
        say("}");
    }
    say("]}");
    finish();
}
