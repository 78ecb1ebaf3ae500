/* The holder of a lock that stores no owner waits for a lock of the kernel. K times the main thread takes the
 * first lock and writes to a pipe, whose mutex another thread has: that one's buffer is a page that
 * userfaultfd leaves missing until HOLD_US later. A thread asks for the first lock as soon as it is taken,
 * and waits for "waited_us" in all. Exit code 77 if there is no userfaultfd. */
#include "workload.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>

static uint32_t outer_lock[8]; /* the first word is 0, 1 or, if a thread may wait, 2 */
static _Atomic long begun, held, answered, written, asked; /* rounds */
static int64_t waited_ns;
static int uffd, pipe_fd[2];
static size_t page_size;
static char *page; /* the page that is left missing */
static long hold_us;

static void take(void)
{
    uint32_t is_free = 0;
    if (__atomic_compare_exchange_n(outer_lock, &is_free, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return;
    while (__atomic_exchange_n(outer_lock, 2, __ATOMIC_SEQ_CST))
        futex_wait_2(outer_lock, -1);
}

static void give(void)
{
    if (__atomic_exchange_n(outer_lock, 0, __ATOMIC_SEQ_CST) == 2)
        check(futex(outer_lock, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0), "futex");
}

static void *ask(void *unused)
{
    for (long round = 1;; round++) {
        wait_until(&held, round);
        int64_t begin = now_ns();
        take();
        waited_ns += now_ns() - begin;
        give();
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
    uffd = syscall(SYS_userfaultfd, O_CLOEXEC);
    if (uffd < 0) {
        perror("userfaultfd");
        return MISSING;
    }
    check(ioctl(uffd, UFFDIO_API, &(struct uffdio_api){.api = UFFD_API}), "UFFDIO_API");
    check(ioctl(uffd, UFFDIO_REGISTER,
                &(struct uffdio_register){
                    .range = {(uintptr_t)page, page_size},
                    .mode = UFFDIO_REGISTER_MODE_MISSING,
                }),
          "UFFDIO_REGISTER");
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
        take();
        held = round;
        check(write(pipe_fd[1], "x", 1), "write pipe");
        give();
        wait_until(&answered, round);
        wait_until(&written, round);
        wait_until(&asked, round);
        if (read(pipe_fd[0], drain, sizeof drain) != 2)
            die("read pipe");
    }
    say("{\"waited_us\": %ld}", (long)(waited_ns / 1000));
    finish();
}
