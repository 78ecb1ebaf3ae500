/* Contended kernel locks, K times each, held for HOLD_US after the waiter is seen asleep. The holder
 * sits inside the lock because its buffer is a page that userfaultfd leaves missing for so long.
 * mutex: the pipe's, by two writers. rwsem_write: a file's inode lock, by two writers; and a directory's,
 * held by a getdents64 and wanted by an rmdir. rwsem_read: the same directory's, wanted by a second
 * getdents64 that queues behind that rmdir. So K waits of mutex, 2 K of rwsem_write, K of rwsem_read.
 * Files are made in DIR. Exit code 77 if there is no userfaultfd. */
#include "workload.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

/* A thread that makes its call each time it is asked. */
struct caller {
    void (*call)(void *buffer);
    long nr;
    void *buffer;
    struct waits waits;
    pid_t tid;
    _Atomic long asked, finished;
};

static long k, hold_us;
static int uffd, pipe_fd[2], file_fd, dir_fd[2];
static size_t page_size;
static char *page; /* the page that is left missing */
static void *zeroes;

static void write_pipe(void *buffer)
{
    check(write(pipe_fd[1], buffer, 1), "write pipe");
}

static void write_file(void *buffer)
{
    check(pwrite(file_fd, buffer, 1, 0), "write file");
}

static void read_dir(void *buffer)
{
    int fd = dir_fd[buffer != page]; /* two descriptors, as the position of each has a lock too */
    check(syscall(SYS_getdents64, fd, buffer, page_size), "getdents64");
    check(lseek(fd, 0, SEEK_SET), "lseek");
}

static void remove_dir(void *unused)
{
    (void)unused;
    if (unlinkat(dir_fd[0], "none", AT_REMOVEDIR) == 0 || errno != ENOENT)
        die("rmdir: wrong result");
}

static void *run(void *p)
{
    struct caller *c = p;
    for (long i = 1; i <= k; i++) {
        wait_until(&c->asked, i);
        struct before b = before();
        c->call(c->buffer);
        after(&c->waits, b);
        c->finished = i;
    }
    pause(); /* for ever: a thread's exit asks for mmap_lock */
    return NULL;
}

/* Threads start one by one, each asleep before the next: starting one asks for mmap_lock. */
static void start(struct caller *c)
{
    c->tid = spawn(run, c);
    wait_asleep(c->tid, SYS_clock_nanosleep);
}

/* The holder takes the lock and faults; the waiters ask one after the other; the fault is answered.
 * Before Linux 5.12 (617f3ef95177) a reader that spins may get an rwsem which a reader holds and a writer
 * waits for. It has not waited then, and is not asleep but done. */
static void contend(struct caller *holder, struct caller *waiters, int count)
{
    struct caller *end = waiters + count;
    start(holder);
    for (struct caller *w = waiters; w < end; w++)
        start(w);
    for (long i = 1; i <= k; i++) {
        struct uffd_msg fault;
        struct uffdio_copy answer = {
            .dst = (uintptr_t)page,
            .src = (uintptr_t)zeroes,
            .len = page_size,
        };
        char drain[16];
        check(madvise(page, page_size, MADV_DONTNEED), "madvise");
        holder->asked = i;
        check(read(uffd, &fault, sizeof fault), "read userfaultfd");
        for (struct caller *w = waiters; w < end; w++) {
            w->asked = i;
            wait_asleep_or(w->tid, w->nr, &w->finished, i);
        }
        nap(hold_us);
        check(ioctl(uffd, UFFDIO_COPY, &answer), "UFFDIO_COPY");
        wait_until(&holder->finished, i);
        for (struct caller *w = waiters; w < end; w++)
            wait_until(&w->finished, i);
        if (holder->call == write_pipe && read(pipe_fd[0], drain, sizeof drain) != 2)
            die("read pipe");
    }
}

static void *new_page(void)
{
    void *p = mmap(NULL, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        die("mmap");
    return p;
}

static void open_all(const char *dir)
{
    char path[4096];
    check(pipe2(pipe_fd, O_CLOEXEC), "pipe");
    snprintf(path, sizeof path, "%s/kernel_locks.%d", dir, getpid());
    file_fd = check(open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600), path);
    check(unlink(path), path);
    check(mkdir(path, 0700), path);
    for (int i = 0; i < 2; i++)
        dir_fd[i] = check(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), path);
    close(check(openat(dir_fd[0], "entry", O_WRONLY | O_CREAT, 0600), "entry"));
}

static void remove_all(const char *dir)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/kernel_locks.%d", dir, getpid());
    check(unlinkat(dir_fd[0], "entry", 0), "entry");
    check(rmdir(path), path);
}

int main(int argc, char **argv)
{
    const char *dir = argc > 3 ? argv[3] : ".";
    k = arg(argc, argv, 1, 50);
    hold_us = arg(argc, argv, 2, 3000);
    page_size = sysconf(_SC_PAGESIZE);
    page = new_page();
    zeroes = memset(new_page(), 0, page_size);
    uffd = watch_missing_page(page, page_size);
    open_all(dir);
    ready();

    struct caller pipe_writer = {.call = write_pipe, .buffer = page};
    struct caller pipe_waiter = {.call = write_pipe, .buffer = zeroes, .nr = SYS_write};
    struct caller file_writer = {.call = write_file, .buffer = page};
    struct caller file_waiter = {.call = write_file, .buffer = zeroes, .nr = SYS_pwrite64};
    struct caller dir_reader = {.call = read_dir, .buffer = page};
    struct caller dir_waiters[] = {
        {.call = remove_dir, .nr = SYS_unlinkat},
        {.call = read_dir, .buffer = new_page(), .nr = SYS_getdents64},
    };
    contend(&pipe_writer, &pipe_waiter, 1);
    contend(&file_writer, &file_waiter, 1);
    contend(&dir_reader, dir_waiters, 2);

    struct waits rwsem_write = {0};
    add_waits(&rwsem_write, &file_waiter.waits);
    add_waits(&rwsem_write, &dir_waiters[0].waits);
    say("{\"kernel\": {");
    say_kernel("mutex", &pipe_waiter.waits);
    say(", ");
    say_kernel("rwsem_write", &rwsem_write);
    say(", ");
    say_kernel("rwsem_read", &dir_waiters[1].waits);
    say("}}");
    publish();
    remove_all(dir);
    finish();
}
