/* K waits off the CPU for each reason that a program can provoke and offcpu_mix does not, each phase in a
 * thread of its own: in `call`, ended 1 ms after the thread sleeps in it, the last of each 20 ms. "phases" is
 * per thread, and its times leave out the run queue; "naps" is the coordination's sleeps, and "queued_us"
 * what the process spent on the run queue. A phase that this kernel has not got is left out. Children, which
 * sleep too, are named as the process with `W` first. */
#include "workload.h"
#include <linux/io_uring.h>
#include <linux/userfaultfd.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>

enum { ROUND_US = 1000, LAST_US = 20000, IN_NO_CALL = -1 };

static long k;
static _Atomic int64_t queued; /* by threads that ended */
static int event_fd, epoll_fd, pair[2], pipe_fd[2], full_pipe[2], memory_fd, terminal[2] = {-1, -1};
static int lock_fd[2], sem_id, msg_id, fault_fd = -1, ring_fd = -1;
static long page;
static char *pages, *source, fifo[4096];
static struct io_uring_params ring;
static char *submissions, *completions;
static struct io_uring_sqe *entries;

struct message {
    long type;
    char byte;
};

static long us_of(long i)
{
    return i == k - 1 ? LAST_US : ROUND_US;
}

static struct timespec time_of(long i)
{
    return (struct timespec){.tv_nsec = us_of(i) * 1000};
}

static void event_once(long i)
{
    uint64_t value = i;
    check(read(event_fd, &value, sizeof value), "read eventfd");
}

static void event_answer(long i)
{
    uint64_t value = i + 1;
    check(write(event_fd, &value, sizeof value), "write eventfd");
}

static void poll_once(long i)
{
    struct epoll_event event;
    check(epoll_pwait(epoll_fd, &event, 1, us_of(i) / 1000, NULL), "epoll_pwait");
}

static void receive_once(long i)
{
    char byte = i;
    check(recv(pair[0], &byte, 1, 0), "recv");
}

static void splice_once(long i)
{
    char byte = i;
    check(splice(pair[0], NULL, pipe_fd[1], NULL, 1, 0), "splice");
    check(read(pipe_fd[0], &byte, 1), "read pipe");
}

static void socket_answer(long i)
{
    char byte = i;
    check(write(pair[1], &byte, 1), "write socket");
}

static void preadv2_once(long i)
{
    char byte = i;
    check(preadv2(pipe_fd[0], &(struct iovec){&byte, 1}, 1, -1, 0), "preadv2");
}

static void preadv2_answer(long i)
{
    char byte = i;
    check(write(pipe_fd[1], &byte, 1), "write pipe");
}

/* It waits for room while the pipe is full. */
static void sendfile_once(long i)
{
    off_t start = 0;
    (void)i;
    check(sendfile(full_pipe[1], memory_fd, &start, page), "sendfile");
}

static void fill_pipe(void)
{
    fcntl(full_pipe[1], F_SETFL, O_NONBLOCK);
    while (write(full_pipe[1], source, page) > 0)
        ;
    fcntl(full_pipe[1], F_SETFL, 0);
}

static void sendfile_answer(long i)
{
    (void)i;
    check(read(full_pipe[0], pages, page), "read pipe");
}

static void device_once(long i)
{
    char byte = i;
    check(read(terminal[0], &byte, 1), "read terminal");
}

static void device_answer(long i)
{
    (void)i;
    check(write(terminal[1], "x", 1), "write terminal");
}

static void fifo_once(long i)
{
    (void)i;
    close(check(open(fifo, O_RDONLY | O_CLOEXEC), "open fifo"));
}

static void fifo_answer(long i)
{
    (void)i;
    close(check(open(fifo, O_WRONLY | O_CLOEXEC), "open fifo to write"));
}

static void flock_prepare(long i)
{
    (void)i;
    check(flock(lock_fd[1], LOCK_EX), "flock");
}

static void flock_once(long i)
{
    (void)i;
    check(flock(lock_fd[0], LOCK_EX), "flock");
    check(flock(lock_fd[0], LOCK_UN), "flock");
}

static void flock_answer(long i)
{
    (void)i;
    check(flock(lock_fd[1], LOCK_UN), "flock");
}

static void record_lock(int fd, int operation, int type)
{
    check(fcntl(fd, operation, &(struct flock){.l_type = type, .l_len = 1}), "fcntl");
}

static void record_prepare(long i)
{
    (void)i;
    record_lock(lock_fd[1], F_OFD_SETLK, F_WRLCK);
}

static void record_once(long i)
{
    (void)i;
    record_lock(lock_fd[0], F_OFD_SETLKW, F_WRLCK);
    record_lock(lock_fd[0], F_OFD_SETLK, F_UNLCK);
}

static void record_answer(long i)
{
    (void)i;
    record_lock(lock_fd[1], F_OFD_SETLK, F_UNLCK);
}

/* Run the child. Its name has a `W` first, so that it is not taken for the process. */
static _Noreturn void sleep_as_child(long i)
{
    char name[17] = "W";
    struct timespec time = time_of(i);
    prctl(PR_GET_NAME, name + 1);
    name[15] = 0;
    prctl(PR_SET_NAME, name);
    syscall(SYS_nanosleep, &time, NULL);
    _exit(0);
}

static pid_t child;

static void wait_prepare(long i)
{
    child = check(fork(), "fork");
    if (!child)
        sleep_as_child(i);
}

static void wait_once(long i)
{
    (void)i;
    check(waitpid(child, NULL, 0), "waitpid");
}

/* The parent waits until the child has ended. The child's memory is a copy. */
static void clone_once(long i)
{
    /* The arguments whose order differs between architectures are all 0. */
    if (!check(syscall(SYS_clone, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0), "clone"))
        sleep_as_child(i);
}

static void clone3_once(long i)
{
    uint64_t arguments[8] = {[0] = CLONE_VFORK, [4] = SIGCHLD}; /* flags, exit_signal */
    if (!check(syscall(SYS_clone3, arguments, sizeof arguments), "clone3"))
        sleep_as_child(i);
}

static void signal_once(long i)
{
    sigset_t none;
    struct timespec time = time_of(i);
    sigemptyset(&none);
    if (sigtimedwait(&none, NULL, &time) >= 0 || errno != EAGAIN)
        die("sigtimedwait");
}

static void semop_once(long i)
{
    (void)i;
    check(syscall(SYS_semop, sem_id, &(struct sembuf){.sem_op = -1}, 1), "semop");
}

static void semop_answer(long i)
{
    (void)i;
    check(syscall(SYS_semop, sem_id, &(struct sembuf){.sem_op = 1}, 1), "semop");
}

static void message_once(long i)
{
    struct message message = {.type = i};
    check(msgrcv(msg_id, &message, 1, 0, 0), "msgrcv");
}

static void message_answer(long i)
{
    struct message message = {.type = i + 1};
    check(msgsnd(msg_id, &message, 1, 0), "msgsnd");
}

static void cond_once(long i)
{
    static uint32_t zero;
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_nsec += us_of(i) * 1000;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    if (!futex(&zero, FUTEX_WAIT_BITSET_PRIVATE, 0, &end, NULL, FUTEX_BITSET_MATCH_ANY) || errno != ETIMEDOUT)
        die("futex: no timeout");
}

/* Touch the page of this turn, into which nothing was put yet. */
static void fault_once(long i)
{
    *(volatile char *)(pages + (i + 1) * page);
}

static void wait_faulting(pid_t tid)
{
    char path[64], text[8] = "";
    snprintf(path, sizeof path, "/proc/%d/syscall", tid);
    for (; strncmp(text, "-1 ", 3); nap(50)) {
        int fd = check(open(path, O_RDONLY | O_CLOEXEC), path);
        check(read(fd, text, sizeof text - 1), path);
        close(fd);
    }
}

static void fault_answer(long i)
{
    struct uffdio_copy copy = {
        .dst = (uintptr_t)(pages + (i + 1) * page), .src = (uintptr_t)source, .len = page};
    check(ioctl(fault_fd, UFFDIO_COPY, &copy), "UFFDIO_COPY");
}

static _Atomic uint32_t *at(char *map, uint32_t offset)
{
    return (_Atomic uint32_t *)(map + offset);
}

/* A request that takes its time; the task is said to wait for I/O meanwhile (6.5). */
static void ring_once(long i)
{
    static struct __kernel_timespec time;
    _Atomic uint32_t *tail = at(submissions, ring.sq_off.tail);
    uint32_t slot = *tail & *at(submissions, ring.sq_off.ring_mask);
    time.tv_nsec = us_of(i) * 1000;
    entries[slot] =
        (struct io_uring_sqe){.opcode = IORING_OP_TIMEOUT, .fd = -1, .addr = (uintptr_t)&time, .len = 1};
    at(submissions, ring.sq_off.array)[slot] = slot;
    ++*tail;
    check(syscall(SYS_io_uring_enter, ring_fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0), "io_uring_enter");
    ++*at(completions, ring.cq_off.head);
}

static char *map_ring(size_t size, off_t offset)
{
    char *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring_fd, offset);
    if (map == MAP_FAILED)
        die("mmap io_uring");
    return map;
}

static void set_up_ring(void)
{
    ring_fd = syscall(SYS_io_uring_setup, 4, &ring);
    if (ring_fd < 0)
        return; /* the kernel has no io_uring, or refuses it */
    submissions = map_ring(ring.sq_off.array + ring.sq_entries * 4, IORING_OFF_SQ_RING);
    completions =
        map_ring(ring.cq_off.cqes + ring.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    entries = (struct io_uring_sqe *)map_ring(ring.sq_entries * sizeof *entries, IORING_OFF_SQES);
}

static void set_up_faults(void)
{
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register range = {.range = {(uintptr_t)(pages + page), k * page},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    fault_fd = syscall(SYS_userfaultfd, O_CLOEXEC);
    if (fault_fd < 0)
        return;
    check(ioctl(fault_fd, UFFDIO_API, &api), "UFFDIO_API");
    check(ioctl(fault_fd, UFFDIO_REGISTER, &range), "UFFDIO_REGISTER");
}

static void set_up_terminal(void)
{
    terminal[0] = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (terminal[0] < 0 || grantpt(terminal[0]) || unlockpt(terminal[0]))
        return;
    terminal[1] = open(ptsname(terminal[0]), O_RDWR | O_NOCTTY | O_CLOEXEC);
}

static void set_up(const char *dir)
{
    char path[2048];
    page = sysconf(_SC_PAGESIZE);
    pages = mmap(NULL, (k + 1) * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    source = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || source == MAP_FAILED)
        die("mmap");
    pages[0] = source[0] = 'x';
    event_fd = check(eventfd(0, EFD_CLOEXEC), "eventfd");
    epoll_fd = check(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), "socketpair");
    check(pipe2(pipe_fd, O_CLOEXEC), "pipe");
    check(pipe2(full_pipe, O_CLOEXEC), "pipe");
    memory_fd = check(memfd_create("offcpu_reasons", MFD_CLOEXEC), "memfd_create");
    check(write(memory_fd, source, page), "write memfd");
    fill_pipe();
    snprintf(path, sizeof path, "%s/offcpu_reasons.%d", dir, getpid());
    for (int i = 0; i < 2; i++)
        lock_fd[i] = check(open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600), path);
    unlink(path);
    snprintf(fifo, sizeof fifo, "%s.fifo", path);
    check(mkfifo(fifo, 0600), fifo);
    sem_id = semget(IPC_PRIVATE, 1, 0600);
    msg_id = msgget(IPC_PRIVATE, 0600);
    set_up_terminal();
    set_up_faults();
    set_up_ring();
}

static void tear_down(void)
{
    unlink(fifo);
    if (sem_id >= 0)
        semctl(sem_id, 0, IPC_RMID);
    if (msg_id >= 0)
        msgctl(msg_id, IPC_RMID, NULL);
}

struct phase {
    const char *reason, *state, *what;
    bool present;
    void (*once)(long i), (*prepare)(long i), (*answer)(long i);
    long call; /* the system call in which the thread sleeps until it is answered */
    struct waits waits;
    pid_t tid;
    _Atomic long asked, finished;
};

static void *run(void *p)
{
    struct phase *me = p;
    for (long i = 0; i < k; i++) {
        wait_until(&me->asked, i + 1);
        int64_t was_queued = queued_ns();
        struct before b = before();
        me->once(i);
        b.ns += queued_ns() - was_queued;
        after(&me->waits, b);
        me->finished = i + 1;
    }
    queued += queued_ns();
    me->finished = k + 1;
    return NULL;
}

static void run_phase(struct phase *p)
{
    p->tid = spawn(run, p);
    for (long i = 0; i < k; i++) {
        if (p->prepare)
            p->prepare(i);
        p->asked = i + 1;
        if (p->answer) {
            if (p->call == IN_NO_CALL)
                wait_faulting(p->tid);
            else
                wait_asleep(p->tid, p->call);
            nap(us_of(i));
            p->answer(i);
        }
        wait_until(&p->finished, i + 1);
    }
    wait_until(&p->finished, k + 1);
}

int main(int argc, char **argv)
{
    const char *asleep = "interruptible", *deep = "uninterruptible";
    k = arg(argc, argv, 1, 10);
    set_up(argc > 2 ? argv[2] : ".");
    struct phase phases[] = {
        {"event", asleep, "eventfd", true, event_once, .answer = event_answer, .call = SYS_read},
        {"poll", asleep, "epoll_pwait", true, .once = poll_once},
        {"socket", asleep, "recv", true, receive_once, .answer = socket_answer, .call = SYS_recvfrom},
        {"socket", asleep, "splice", true, splice_once, .answer = socket_answer, .call = SYS_splice},
        {"pipe", asleep, "preadv2", true, preadv2_once, .answer = preadv2_answer, .call = SYS_preadv2},
        {"pipe", asleep, "sendfile", true, sendfile_once, .answer = sendfile_answer, .call = SYS_sendfile},
        {"device", asleep, "terminal", terminal[1] >= 0, device_once, .answer = device_answer,
         .call = SYS_read},
        {"file", asleep, "fifo", true, fifo_once, .answer = fifo_answer, .call = SYS_openat},
        {"file_lock", asleep, "flock", true, flock_once, .prepare = flock_prepare, .answer = flock_answer,
         .call = SYS_flock},
        {"file_lock", asleep, "fcntl", true, record_once, .prepare = record_prepare, .answer = record_answer,
         .call = SYS_fcntl},
        {"signal", asleep, "sigtimedwait", true, .once = signal_once},
        {"ipc", asleep, "semop", sem_id >= 0, semop_once, .answer = semop_answer, .call = SYS_semop},
        {"ipc", asleep, "msgrcv", msg_id >= 0, message_once, .answer = message_answer, .call = SYS_msgrcv},
        {"cond", asleep, "futex", true, .once = cond_once},
        {"fault", asleep, "userfaultfd", fault_fd >= 0, fault_once, .answer = fault_answer,
         .call = IN_NO_CALL},
        {"io_uring", asleep, "io_uring", ring_fd >= 0, .once = ring_once},
        {"child", asleep, "waitpid", true, wait_once, .prepare = wait_prepare},
        {"child", deep, "clone", true, .once = clone_once},
        {"child", deep, "clone3", true, .once = clone3_once},
    };
    struct phase *end = phases + sizeof phases / sizeof *phases;
    ready();
    queued = -queued_ns();
    for (struct phase *p = phases; p < end; p++)
        if (p->present)
            run_phase(p);
    say("{\"missing\": [");
    const char *comma = "";
    for (struct phase *p = phases; p < end; p++)
        if (!p->present) {
            say("%s\"%s\"", comma, p->what);
            comma = ", ";
        }
    say("], \"phases\": [");
    comma = "";
    for (struct phase *p = phases; p < end; p++)
        if (p->present) {
            say("%s{\"tid\": %d, \"what\": \"%s\", \"calls\": %ld, ", comma, p->tid, p->what, p->waits.waits);
            say_offcpu(p->state, p->reason, &p->waits);
            say("}");
            comma = ", ";
        }
    say("], \"naps\": {");
    say_offcpu(asleep, "sleep", &naps);
    say("}, \"queued_us\": %ld}", (long)((queued + queued_ns()) / 1000));
    tear_down();
    finish();
}
