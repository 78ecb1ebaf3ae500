/* The holder of a lock that stores no owner waits for a lock of the kernel. K times the main thread takes the
 * first lock and writes to a pipe, whose mutex another thread has: that one's buffer is a page that
 * userfaultfd leaves missing until HOLD_US later. A thread asks for the first lock as soon as it is taken,
 * and waits for "waited_us" in all. Exit code 77 if there is no userfaultfd. */
#include "workload.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>

static uint32_t outer_lock[8]; /* the first word; in the others a mutex of glibc would have its owner */
static _Atomic long begun, held, answered, written, asked; /* rounds */
static int64_t waited_ns;
static int uffd, pipe_fd[2];
static size_t page_size;
static char *page; /* the page that is left missing */
static long hold_us;

static void *ask(void *unused)
{
    for (long round = 1;; round++) {
        wait_until(&held, round);
        int64_t begin = now_ns();
        take_ownerless(outer_lock);
        waited_ns += now_ns() - begin;
        give_ownerless(outer_lock);
        asked = round;
    }
    return unused;
}

static void *hold_pipe(void *unused)
{
    for (long round = 1;; round++) {
        wait_until(&begun, round);
        check(write(pipe_fd[1], page, 1), "write pipe");
        written = round;
    }
    return unused;
}

static void *answer(void *zeroes)
{
    struct uffdio_copy copy = {.dst = (uintptr_t)page, .src = (uintptr_t)zeroes, .len = page_size};
    for (long round = 1;; round++) {
        wait_until(&held, round);
        nap(hold_us);
        check(ioctl(uffd, UFFDIO_COPY, &copy), "UFFDIO_COPY");
        answered = round;
    }
    return zeroes;
}

int main(int argc, char **argv)
{
    long k = arg(argc, argv, 1, 20);
    hold_us = arg(argc, argv, 2, 30000);
    page_size = sysconf(_SC_PAGESIZE);
    page = mmap(NULL, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        die("mmap");
    uffd = watch_missing_page(page, page_size);
    check(pipe2(pipe_fd, O_CLOEXEC), "pipe");
    ready();

    spawn(ask, NULL);
    spawn(hold_pipe, NULL);
    spawn(answer, calloc(1, page_size));
    for (long round = 1; round <= k; round++) {
        struct uffd_msg fault;
        char drain[3];
        check(madvise(page, page_size, MADV_DONTNEED), "madvise");
        begun = round;
        check(read(uffd, &fault, sizeof fault), "read userfaultfd");
        take_ownerless(outer_lock);
        held = round;
        check(write(pipe_fd[1], "x", 1), "write pipe");
        give_ownerless(outer_lock);
        wait_until(&answered, round);
        wait_until(&written, round);
        wait_until(&asked, round);
        if (read(pipe_fd[0], drain, sizeof drain) != 2)
            die("read pipe");
    }
    say("{\"waited_us\": %ld}", (long)(waited_ns / 1000));
    finish();
}
