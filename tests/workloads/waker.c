/* A process that waits and the one that wakes it: K times a child reads a pipe, and its parent writes to it
 * 1 ms after it sees the child asleep. The child's name is the parent's with W for its first letter. Its
 * waits leave out the "queued_us" that it spent on the run queue. */
#include "workload.h"
#include <sys/prctl.h>

static long k;
static int pipe_fd[2];

struct child {
    struct waits waits;
    int64_t queued;
};

static _Noreturn void child(const char *name, struct child *me)
{
    char byte;
    prctl(PR_SET_NAME, name);
    for (long i = 0; i < k; i++) {
        int64_t was_queued = queued_ns();
        struct before b = before();
        check(read(pipe_fd[0], &byte, 1), "read pipe");
        was_queued = queued_ns() - was_queued;
        me->queued += was_queued;
        b.ns += was_queued;
        after(&me->waits, b);
    }
    _exit(0);
}

int main(int argc, char **argv)
{
    char name[16];
    int status;
    k = arg(argc, argv, 1, 50);
    struct child *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        die("mmap");
    check(pipe2(pipe_fd, O_CLOEXEC), "pipe");
    ready();
    prctl(PR_GET_NAME, name);
    name[0] = 'W';
    pid_t pid = check(fork(), "fork");
    if (!pid)
        child(name, shared);
    for (long i = 0; i < k; i++) {
        wait_until(&shared->waits.waits, i);
        wait_asleep(pid, SYS_read);
        nap(1000);
        check(write(pipe_fd[1], "x", 1), "write pipe");
    }
    check(waitpid(pid, &status, 0), "waitpid");
    if (status) {
        fprintf(stderr, "the child ended with status %#x\n", status);
        return 1;
    }
    say("{\"waiter\": \"%s\", \"pid\": %d, \"queued_us\": %ld, ", name, pid, (long)(shared->queued / 1000));
    say_offcpu("interruptible", "pipe", &shared->waits);
    say("}");
    finish();
}
