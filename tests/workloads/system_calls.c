/* System calls of known results and lengths: pread64 (numbers of bytes, errors), ppoll and futex (timeouts);
 * readv that a signal interrupts, whose handler has it fail or begin again; clock_nanosleep and wait4 that go
 * on after the process was stopped. At the end a thread is in readv for ever. */
#include "workload.h"
#include <poll.h>
#include <sys/uio.h>

#define SHORT_MS 5
#define LONG_MS 40
#define STOP_MS 30

static const struct {
    long bytes, calls;
} reads[] = {{0, 2}, {1, 3}, {7, 5}, {100, 11}, {4096, 13}, {65536, 4}};
static char buffer[65536];
static int pipe_ends[2];
static uint32_t two = 2;

static _Atomic long returned;

static void do_nothing(int unused)
{
    (void)unused;
}

static void write_byte(int unused)
{
    (void)unused;
    check(write(pipe_ends[1], "x", 1), "write");
}

static void handle(int signal, void (*handler)(int), int flags)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    check(sigaction(signal, &action, NULL), "sigaction");
}

/* Interrupts the main thread in readv: by turns with SIGUSR1 and SIGUSR2. */
static void *interrupter(void *times)
{
    for (long i = 0; i < *(long *)times; i++) {
        wait_asleep(getpid(), SYS_readv);
        check(syscall(SYS_tgkill, getpid(), getpid(), i % 2 ? SIGUSR2 : SIGUSR1), "tgkill");
        wait_until(&returned, i + 1);
    }
    return times;
}

/* A child that stops its parent for STOP_MS, STOP_MS after it is asleep in the call, and ends as much later.
 */
static void be_stopped_by_child(void)
{
    pid_t parent = getpid(), child = check(fork(), "fork");
    struct timespec longer = {.tv_nsec = 5 * STOP_MS * 1000000};
    if (child) {
        check(syscall(SYS_nanosleep, &longer, NULL), "nanosleep"); /* goes on by restart_syscall() */
        check(waitpid(child, NULL, 0), "waitpid"); /* goes on as the same call */
        return;
    }
    const long calls[] = {SYS_nanosleep, SYS_wait4};
    for (int i = 0; i < 2; i++) {
        wait_asleep(parent, calls[i]);
        nap(STOP_MS * 1000);
        check(kill(parent, SIGSTOP), "kill");
        nap(STOP_MS * 1000);
        check(kill(parent, SIGCONT), "kill");
    }
    nap(STOP_MS * 1000);
    _exit(0);
}

static void *stuck(void *unused)
{
    struct iovec to = {buffer, 1};
    readv(*(int *)unused, &to, 1);
    return unused;
}

int main(int argc, char **argv)
{
    long k = arg(argc, argv, 1, 10);
    struct timespec brief = {.tv_nsec = SHORT_MS * 1000000}, lengthy = {.tv_nsec = LONG_MS * 1000000};
    struct iovec to = {buffer, 1};
    int zero = check(open("/dev/zero", O_RDONLY), "open"), empty[2];
    check(pipe(pipe_ends), "pipe");
    check(pipe(empty), "pipe");
    ready();

    say("{\"tgid\": %d, \"pread64\": {\"ESPIPE\": %ld, \"EBADF\": %ld", getpid(), 2 * k, k);
    for (long i = 0; i < 2 * k; i++)
        if (pread(pipe_ends[0], buffer, 1, 0) >= 0 || errno != ESPIPE)
            die("pread from a pipe");
    for (long i = 0; i < k; i++)
        if (pread(-1, buffer, 1, 0) >= 0 || errno != EBADF)
            die("pread from nothing");
    for (unsigned i = 0; i < sizeof reads / sizeof *reads; i++) {
        for (long n = 0; n < reads[i].calls; n++)
            check(pread(zero, buffer, reads[i].bytes, 0), "pread");
        say(", \"%ld\": %ld", reads[i].bytes, reads[i].calls);
    }
    say("}");

    for (long i = 0; i < k; i++) {
        check(ppoll(NULL, 0, &brief, NULL), "ppoll");
        check(ppoll(NULL, 0, &lengthy, NULL), "ppoll");
    }
    for (long i = 0; i < k; i++) {
        if (futex(&two, FUTEX_WAIT, 2, &brief, NULL, 0) == 0 || errno != ETIMEDOUT)
            die("futex: no timeout");
        if (futex(&two, FUTEX_WAIT, 3, &brief, NULL, 0) == 0 || errno != EAGAIN)
            die("futex: no EAGAIN");
    }

    long interrupts = 2 * k;
    handle(SIGUSR1, do_nothing, 0);
    handle(SIGUSR2, write_byte, SA_RESTART);
    spawn(interrupter, &interrupts);
    while (returned < interrupts) {
        if (readv(pipe_ends[0], &to, 1) >= 0 || errno != EINTR)
            die("readv: not interrupted");
        returned++;
        check(readv(pipe_ends[0], &to, 1), "readv: not begun again"); /* and then there is a byte */
        returned++;
    }
    be_stopped_by_child();
    say(", \"k\": %ld, \"short_us\": %d, \"long_us\": %d, \"slept_us\": %d, \"waited_us\": %d, \"stuck\": "
        "%d}",
        k, SHORT_MS * 1000, LONG_MS * 1000, 5 * STOP_MS * 1000, 3 * STOP_MS * 1000, spawn(stuck, &empty[0]));
    finish();
}
