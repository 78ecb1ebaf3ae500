/* CALLS calls of getppid(), each from a chain of DEPTH of the eight functions f0 to f7 that is drawn at
 * random (the same in every run), PAUSE_US apart: at most 8^DEPTH different stacks. */
#include "workload.h"

static uint64_t drawn = 88172645463325252;
static long calls;

static unsigned draw(void)
{
    drawn ^= drawn << 13;
    drawn ^= drawn >> 7;
    drawn ^= drawn << 17;
    return drawn >> 11 & 7;
}

static int call_one(long depth)
{
    extern int (*const functions[])(long);

    if (depth)
        return functions[draw()](depth - 1);
    calls++;
    return syscall(SYS_getppid);
}

#define FUNCTION(n)                                                                                          \
    __attribute__((noinline)) int f##n(long depth)                                                           \
    {                                                                                                        \
        int result = call_one(depth);                                                                        \
        __asm__ volatile("" : "+r"(result)); /* not a call at the end, nor the same function as another */   \
        return result + n;                                                                                   \
    }

FUNCTION(0)
FUNCTION(1)
FUNCTION(2)
FUNCTION(3)
FUNCTION(4)
FUNCTION(5)
FUNCTION(6)
FUNCTION(7)

int (*const functions[])(long) = {f0, f1, f2, f3, f4, f5, f6, f7};

int main(int argc, char **argv)
{
    long rounds = arg(argc, argv, 1, 1000), depth = arg(argc, argv, 2, 3), pause = arg(argc, argv, 3, 0);

    ready();
    for (long i = 0; i < rounds; i++) {
        call_one(depth);
        if (pause)
            nap(pause);
    }
    say("{\"calls\": %ld}", calls);
    finish();
}
