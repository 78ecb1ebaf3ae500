/* A worker that the kernel makes for a process: the thread that polls the ring of io_uring. It sleeps ROUNDS
 * times until it is called, and has the registers of the thread that asked for the ring. Exit code 77 if
 * there is no io_uring, or if its workers are kernel threads (before 5.12). */
#include "workload.h"
#include <dirent.h>
#include <linux/io_uring.h>

#define IDLE_MS 1 /* the idle time after which the worker sleeps */

/* The id of the thread besides this one; 0 if there is none. */
static pid_t other_thread(void)
{
    DIR *tasks = opendir("/proc/self/task");
    pid_t found = 0;

    if (!tasks)
        die("/proc/self/task");
    for (struct dirent *one; (one = readdir(tasks));)
        if (atoi(one->d_name) && atoi(one->d_name) != getpid())
            found = atoi(one->d_name);
    closedir(tasks);
    return found;
}

int main(int argc, char **argv)
{
    long rounds = arg(argc, argv, 1, 20);

    ready();
    struct io_uring_params params = {.flags = IORING_SETUP_SQPOLL, .sq_thread_idle = IDLE_MS};
    int ring = syscall(SYS_io_uring_setup, 4, &params);
    pid_t worker = ring < 0 ? 0 : other_thread();
    if (!worker)
        return MISSING;
    for (long i = 0; i < rounds; i++) {
        wait_asleep(worker, SYS_io_uring_setup);
        check(syscall(SYS_io_uring_enter, ring, 0, 0, IORING_ENTER_SQ_WAKEUP, NULL, 0), "io_uring_enter");
        nap(20000); /* by then it has run, and sleeps again */
    }
    say("{\"worker\": %d, \"sleeps\": %ld}", worker, rounds);
    finish();
}
