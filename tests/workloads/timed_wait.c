/* One futex wait (kind lock) that times out after MS, to be stopped and continued meanwhile: the kernel then
 * goes on with it as restart_syscall, to the same end. "us" is how long it took, stops included. */
#include "workload.h"

int main(int argc, char **argv)
{
    static uint32_t two = 2;
    long ms = arg(argc, argv, 1, 3000);
    ready();
    int64_t start = now_ns();
    int error = futex_wait_2(&two, ms * 1000);
    say("{\"us\": %ld, \"errno\": %d}", (long)((now_ns() - start) / 1000), error);
    finish();
}
