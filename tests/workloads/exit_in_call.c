/* Threads that end inside a futex wait (kind lock): N that die by exit_group, N by another thread's
 * exec, N by SIGKILL. 3 N waits, all blocked, none of which returns; each lasts "held_us" or more. */
#include "workload.h"

static uint32_t two = 2;
static long n;

static void *blocked(void *unused)
{
    futex_wait_2(&two, -1);
    return unused;
}

static void *exec(void *unused)
{
    execl("/bin/true", "true", NULL);
    _exit(1);
    return unused;
}

enum end { BY_EXIT, BY_EXEC, BY_KILL };

static _Noreturn void child(enum end end, int ready_fd)
{
    for (long i = 0; i < n; i++)
        wait_asleep(spawn(blocked, NULL), SYS_futex);
    nap(20000);
    check(write(ready_fd, "x", 1), "write");
    if (end == BY_EXIT)
        _exit(0);
    if (end == BY_EXEC)
        spawn(exec, NULL);
    for (;;)
        pause();
}

int main(int argc, char **argv)
{
    int fd[2], status, pid[3];
    char byte;
    n = arg(argc, argv, 1, 8);
    ready();
    check(pipe2(fd, O_CLOEXEC), "pipe");
    for (enum end end = BY_EXIT; end <= BY_KILL; end++) {
        pid[end] = check(fork(), "fork");
        if (!pid[end])
            child(end, fd[1]);
        check(read(fd[0], &byte, 1), "read");
        if (end == BY_KILL)
            kill(pid[end], SIGKILL);
        check(waitpid(pid[end], &status, 0), "waitpid");
        if (end == BY_KILL ? !WIFSIGNALED(status) : status != 0) {
            fprintf(stderr, "child %d ended with status %#x\n", end, status);
            return 1;
        }
    }
    say("{\"pids\": {\"exit\": %d, \"exec\": %d, \"kill\": %d}, \"held_us\": 20000, ", pid[BY_EXIT],
        pid[BY_EXEC], pid[BY_KILL]);
    say("\"futex\": {\"lock\": {\"waits\": %ld, \"blocked\": %ld}}, \"wakes\": 0}", 3 * n, 3 * n);
    finish();
}
