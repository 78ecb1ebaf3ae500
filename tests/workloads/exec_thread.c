/* A thread that is not the leader calls exec, and so takes over the leader's id: K futex waits (kind lock) of
 * 2 ms by it before and K after, while N others are blocked in one each, which the exec ends. N + 2 K waits,
 * all blocked; "others_us" is how long the N were blocked at least. */
#include "workload.h"
#include <sys/prctl.h>

static long k, n;
static uint32_t two = 2;
static struct waits waits;
static int64_t others_since;

static void wait_k_times(void)
{
    for (long i = 0; i < k; i++) {
        struct before b = before();
        if (futex_wait_2(&two, 2000) != ETIMEDOUT)
            die("futex: no timeout");
        after(&waits, b);
    }
}

static void *blocked(void *unused)
{
    futex_wait_2(&two, -1);
    return unused;
}

static void *exec(void *name)
{
    char text[8][24];
    wait_k_times();
    long numbers[] = {k,
                      waits.blocked,
                      waits.sleeps,
                      waits.sum_ns,
                      waits.max_ns,
                      waits.least_ns,
                      waits.max_least_ns,
                      n * (now_ns() - others_since)};
    for (int i = 0; i < 8; i++)
        snprintf(text[i], sizeof text[i], "%ld", numbers[i]);
    execl("/proc/self/exe", "exec_thread", "again", text[0], text[1], text[2], text[3], text[4], text[5],
          text[6], text[7], name, NULL);
    die("exec");
}

static _Noreturn void again(int argc, char **argv)
{
    prctl(PR_SET_NAME, argv[argc - 1]);
    k = arg(argc, argv, 2, 0);
    waits = (struct waits){k,
                           arg(argc, argv, 3, 0),
                           arg(argc, argv, 4, 0),
                           arg(argc, argv, 5, 0),
                           arg(argc, argv, 6, 0),
                           arg(argc, argv, 7, 0),
                           arg(argc, argv, 8, 0)};
    wait_k_times();
    say("{\"tid\": %d, \"others_us\": %ld, \"futex\": {", gettid(), arg(argc, argv, 9, 0) / 1000);
    say_futex("lock", &waits);
    say("}, \"wakes\": 0, \"errors\": {\"ETIMEDOUT\": %ld}}", waits.waits);
    finish();
}

int main(int argc, char **argv)
{
    static char name[16];
    if (argc == 11 && !strcmp(argv[1], "again"))
        again(argc, argv);
    k = arg(argc, argv, 1, 20);
    n = arg(argc, argv, 2, 4);
    ready();
    prctl(PR_GET_NAME, name);
    for (long i = 0; i < n; i++)
        wait_asleep(spawn(blocked, NULL), SYS_futex);
    others_since = now_ns();
    spawn(exec, name);
    for (;;)
        pause();
}
