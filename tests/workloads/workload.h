/* What every workload shares: the protocol with the test, threads that make no futex calls of
 * their own, and the bookkeeping of true counts and times. README.md describes the protocol. */
#ifndef WORKLOAD_H
#define WORKLOAD_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MISSING 77 /* exit code: this kernel lacks what the program needs */

/* Protocol. */
long arg(int argc, char **argv, int index, long otherwise); /* a number >= 0 */
void ready(void); /* name the process, say "ready PID", wait for a byte */
void wait_for_byte(void); /* by which the test says when to go on */
void say(const char *format, ...) __attribute__((format(printf, 1, 2))); /* add to the line of output */
void publish(void); /* send the line */
_Noreturn void finish(void); /* publish what is left, wait for the end of stdin, exit 0 */
_Noreturn void die(const char *what); /* message with errno, exit 1 */

static inline long check(long result, const char *what)
{
    if (result < 0)
        die(what);
    return result;
}

/* Time. Every sleep of a workload goes through nap(), so that `naps` knows them all. */
int64_t now_ns(void);
void nap(long us);
void spin(long us);
void use_processor(bool last); /* stay on the first processor that this process may use, or the last */

/* Waits, measured by the waiter. A wait blocked if the thread was switched out voluntarily,
 * which the kernel counts (ru_nvcsw); only those add to the times.
 *
 * A clock that is read before and after the call (sum, max) runs on while the thread is disturbed on its way
 * to sleep or back. The kernel tells a lower bound (least, and the largest: max_least): that time without the
 * thread's own time on the CPU, and nothing for a wait in which the thread was preempted (ru_nivcsw). */
struct waits {
    _Atomic long waits, blocked, sleeps;
    _Atomic int64_t sum_ns, max_ns, least_ns, max_least_ns;
};
struct before {
    int64_t ns, cpu_ns;
    long switches, preemptions;
};
extern struct waits naps;
struct before before(void);
void after(struct waits *w, struct before b);
void add_waits(struct waits *sum, const struct waits *w);
int64_t thread_cpu_ns(void); /* the time that this thread has run so far */
int64_t queued_ns(void); /* what this thread ever spent on the run queue; 0 if not known */
void say_futex(const char *kind, const struct waits *w); /* "kind": {...} */
void say_offcpu(const char *state, const char *reason, const struct waits *w);
void say_kernel(const char *lock_type, const struct waits *w);

/* Threads. They are never joined: a join is a futex wait. */
pid_t spawn(void *(*run)(void *), void *arg); /* returns its tid once the thread runs */
void wait_until(_Atomic long *value, long least); /* polls until *value >= least */
void wait_asleep(pid_t tid, long syscall_nr); /* polls until that thread sleeps in the call */
/* polls until it sleeps in the call, or *finished >= value */
void wait_asleep_or(pid_t tid, long syscall_nr, _Atomic long *finished, long value);

/* A lock handed over `rounds` times. The owner takes it; the asker asks; `hold_us` after the asker
 * is seen asleep the owner gives it away. So every ask is one wait, and every wait blocks. */
struct handover {
    void *lock;
    long rounds, hold_us;
    bool busy; /* hold spinning instead of sleeping */
    void (*take)(void *), (*give)(void *); /* called by the owner, the caller of hand_over() */
    void (*ask)(void *), (*done)(void *); /* called by the asker, a thread of its own */
    struct waits waits;
    _Atomic long asked, finished;
};
void hand_over(struct handover *h);

static inline long futex(void *word, int op, uint32_t value, const struct timespec *timeout, void *word2,
                         uint32_t value3)
{
    return syscall(SYS_futex, word, op, value, timeout, word2, value3);
}

/* FUTEX_WAIT for the value 2 (kind lock); 0 or the errno. timeout_us < 0: for ever. */
int futex_wait_2(void *word, long timeout_us);

/* A lock that stores no owner. The word is 0, 1 or, if a thread may wait, 2. */
void take_ownerless(uint32_t *word);
void give_ownerless(uint32_t *word);

/* Returns a userfaultfd for a page of memory that nobody has touched: who does waits until UFFDIO_COPY.
 * Exits with MISSING if this kernel has none. */
int watch_missing_page(void *page, size_t size);

#endif
