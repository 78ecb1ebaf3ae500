/* A steady mixed load for cost measurements: pairs of threads share a contended mutex, play ping-pong
 * on a condition variable or through pipes, or sleep, each with PAUSE_US between its operations (0: as
 * fast as can be). Reports operations done and CPU time used; makes nothing else exact. */
#include "workload.h"

struct pair {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    int turn, pipe[2][2];
    _Atomic int members;
};

static pthread_mutex_t contended = PTHREAD_MUTEX_INITIALIZER;
static _Atomic long ops[4]; /* mutex, cond, pipe, sleep */
static _Atomic bool stop;
static long pause_us;

static void mutex_op(struct pair *p, int me)
{
    (void)p, (void)me;
    pthread_mutex_lock(&contended);
    spin(20);
    pthread_mutex_unlock(&contended);
}

static void cond_op(struct pair *p, int me)
{
    pthread_mutex_lock(&p->mutex);
    while (p->turn != me)
        pthread_cond_wait(&p->cond, &p->mutex);
    p->turn = !me;
    pthread_mutex_unlock(&p->mutex);
    pthread_cond_signal(&p->cond);
}

static void pipe_op(struct pair *p, int me)
{
    char byte = 0;
    check(write(p->pipe[me][1], &byte, 1), "write pipe");
    check(read(p->pipe[!me][0], &byte, 1), "read pipe");
}

static void sleep_op(struct pair *p, int me)
{
    (void)p, (void)me;
    nap(200);
}

static void (*const roles[4])(struct pair *, int) = {mutex_op, cond_op, pipe_op, sleep_op};
static struct pair *pairs;

static void *run(void *p)
{
    struct pair *pair = p;
    int role = (pair - pairs) % 4, me = pair->members++;
    while (!stop) {
        roles[role](pair, me);
        ops[role]++;
        if (pause_us)
            nap(pause_us);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    long seconds = arg(argc, argv, 1, 60), threads = arg(argc, argv, 2, 16);
    pause_us = arg(argc, argv, 3, 200);
    pairs = calloc(threads / 2 + 1, sizeof *pairs);
    for (long i = 0; i < threads; i += 2) {
        struct pair *p = &pairs[i / 2];
        pthread_mutex_init(&p->mutex, NULL);
        pthread_cond_init(&p->cond, NULL);
        for (int side = 0; side < 2; side++)
            check(pipe2(p->pipe[side], O_CLOEXEC), "pipe");
    }
    ready();
    int64_t start = now_ns();
    for (long i = 0; i < threads; i++)
        spawn(run, &pairs[i / 2]);
    nap(seconds * 1000000);
    stop = true; /* one thread of a pair may be left waiting for the other */
    struct timespec cpu;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    say("{\"wall_us\": %ld, \"cpu_us\": %ld, \"ops\": {\"mutex\": %ld, \"cond\": %ld, \"pipe\": %ld, "
        "\"sleep\": %ld}}",
        (long)((now_ns() - start) / 1000), (long)(cpu.tv_sec * 1000000 + cpu.tv_nsec / 1000), ops[0], ops[1],
        ops[2], ops[3]);
    finish();
}
