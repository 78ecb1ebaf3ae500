/* A pipe's mutex, ROUNDS times: held for HOLD_US after all of THREADS writers are seen asleep waiting for it.
 * The holder sits inside it because its buffer is a page that userfaultfd leaves missing for so long. So
 * THREADS x ROUNDS waits of type mutex. Exit code 77 if there is no userfaultfd. */
#include "workload.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>

struct writer {
    struct waits waits;
    pid_t tid;
    _Atomic long finished;
};

static long rounds;
static _Atomic long held, asked; /* rounds that may begin: the holder's, the writers' */
static int pipe_fd[2];
static char *page; /* the page that is left missing */

static void *hold(void *p)
{
    struct writer *me = p;
    for (long i = 1; i <= rounds; i++) {
        wait_until(&held, i);
        check(write(pipe_fd[1], page, 1), "write pipe");
        me->finished = i;
    }
    pause(); /* for ever: a thread's exit asks for mmap_lock */
    return NULL;
}

static void *ask(void *p)
{
    struct writer *me = p;
    for (long i = 1; i <= rounds; i++) {
        while (asked < i)
            nap(5000);
        struct before b = before();
        check(write(pipe_fd[1], "x", 1), "write pipe");
        after(&me->waits, b);
        me->finished = i;
    }
    pause();
    return NULL;
}

int main(int argc, char **argv)
{
    size_t page_size = sysconf(_SC_PAGESIZE);
    long threads = arg(argc, argv, 1, 200);
    rounds = arg(argc, argv, 2, 5);
    long hold_us = arg(argc, argv, 3, 3000);
    struct writer *writers = calloc(threads, sizeof *writers), holder = {0};
    void *zeroes = calloc(1, page_size);
    char *drain = malloc(threads + 1);
    struct waits waits = {0};

    page = mmap(NULL, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        die("mmap");
    int uffd = watch_missing_page(page, page_size);
    check(pipe2(pipe_fd, O_CLOEXEC), "pipe");
    ready();

    spawn(hold, &holder);
    for (long n = 0; n < threads; n++)
        writers[n].tid = spawn(ask, &writers[n]);
    for (long i = 1; i <= rounds; i++) {
        struct uffd_msg fault;
        struct uffdio_copy answer = {
            .dst = (uintptr_t)page,
            .src = (uintptr_t)zeroes,
            .len = page_size,
        };
        check(madvise(page, page_size, MADV_DONTNEED), "madvise");
        held = i;
        check(read(uffd, &fault, sizeof fault), "read userfaultfd");
        asked = i;
        for (long n = 0; n < threads; n++)
            wait_asleep(writers[n].tid, SYS_write);
        nap(hold_us);
        check(ioctl(uffd, UFFDIO_COPY, &answer), "UFFDIO_COPY");
        wait_until(&holder.finished, i);
        for (long n = 0; n < threads; n++)
            wait_until(&writers[n].finished, i);
        if (read(pipe_fd[0], drain, threads + 1) != threads + 1)
            die("read pipe");
    }
    for (long n = 0; n < threads; n++)
        add_waits(&waits, &writers[n].waits);
    say("{\"kernel\": {");
    say_kernel("mutex", &waits);
    say("}}");
    finish();
}
