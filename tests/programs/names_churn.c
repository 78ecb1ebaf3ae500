/* Short-lived processes: PER_MINUTE a minute for SECONDS, each of which blocks once, for HELD_US or more, on
 * a static mutex. `names_churn [PER_MINUTE=2000] [SECONDS=10] [HELD_US=30000]`; prints how many there were.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HAS_WAITERS 2 /* in glibc; it blocks next */

static pthread_mutex_t churned_mutex = PTHREAD_MUTEX_INITIALIZER;

static void *wait_shortly(void *unused)
{
    pthread_mutex_lock(&churned_mutex);
    pthread_mutex_unlock(&churned_mutex);
    return unused;
}

static int be_short_lived(long held_us)
{
    struct timespec held = {held_us / 1000000, held_us % 1000000 * 1000};
    pthread_t waiter;
    pthread_mutex_lock(&churned_mutex);
    pthread_create(&waiter, NULL, wait_shortly, NULL);
    while (__atomic_load_n(&churned_mutex.__data.__lock, __ATOMIC_RELAXED) != HAS_WAITERS)
        usleep(100);
    nanosleep(&held, NULL);
    pthread_mutex_unlock(&churned_mutex);
    return pthread_join(waiter, NULL);
}

static void start_another(const char *program, const char *held_us)
{
    pid_t child = fork();
    if (child == 0) {
        execl(program, program, "child", held_us, NULL);
        _exit(1);
    }
    if (child < 0)
        fprintf(stderr, "fork: %s\n", strerror(errno));
}

static long arg(int argc, char **argv, int at, long otherwise)
{
    return argc > at ? atol(argv[at]) : otherwise;
}

int main(int argc, char **argv)
{
    if (argc > 2 && !strcmp(argv[1], "child"))
        return be_short_lived(atol(argv[2]));
    long per_minute = arg(argc, argv, 1, 2000), seconds = arg(argc, argv, 2, 10), failed = 0;
    long wanted = per_minute * seconds / 60;
    struct timespec next;
    clock_gettime(CLOCK_MONOTONIC, &next);
    for (long i = 0, running = 0; i < wanted || running;) {
        int status, options = i < wanted ? WNOHANG : 0;
        if (i < wanted) {
            next.tv_nsec += 60000000000L / per_minute;
            next.tv_sec += next.tv_nsec / 1000000000;
            next.tv_nsec %= 1000000000;
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
            start_another(argv[0], argc > 3 ? argv[3] : "30000");
            i++, running++;
        }
        while (running && waitpid(-1, &status, options) > 0) {
            running--;
            failed += status != 0;
        }
    }
    printf("{\"processes\": %ld, \"failed\": %ld}\n", wanted, failed);
}
