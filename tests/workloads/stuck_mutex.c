/* One thread waits for ever for a mutex whose owner never lets go: one wait of kind lock that began
 * at since_monotonic_ns and does not end before the process is killed (or stdin ends). */
#include "workload.h"

pthread_mutex_t stuck_mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int64_t since;

static void *waiter(void *unused)
{
    since = now_ns();
    pthread_mutex_lock(&stuck_mutex);
    return unused;
}

int main(void)
{
    ready();
    pthread_mutex_lock(&stuck_mutex);
    pid_t tid = spawn(waiter, NULL);
    wait_asleep(tid, SYS_futex);
    say("{\"tid\": %d, \"owner_tid\": %d, \"addr\": \"%p\", \"since_monotonic_ns\": %lld, "
        "\"futex\": {\"lock\": {\"waits\": 1}}, \"wakes\": 0, \"errors\": {}}",
        tid, getpid(), (void *)&stuck_mutex, (long long)since);
    finish();
}
