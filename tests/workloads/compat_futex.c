/* A 32-bit program, whose system calls have other numbers and other registers: K waits (kind lock) that time
 * out after WAIT_US, every other one by futex_time64. "us" is how long all of them took, "blocked" how often
 * the thread slept: where the processor is taken away for longer than WAIT_US, a wait is over before it
 * sleeps. It is built without any library, as 32-bit ones are seldom installed. */
#ifdef __i386__
enum {
    EXIT = 1,
    READ = 3,
    WRITE = 4,
    GETPID = 20,
    GETRUSAGE = 77,
    PRCTL = 172,
    FUTEX = 240,
    CLOCK_GETTIME = 265,
    FUTEX_TIME64 = 422
};

static int value = 2; /* the value of a glibc mutex with waiters */

static int call(int nr, int a, int b, int c, int d)
{
    int result;
    __asm__ volatile("int $0x80" : "=a"(result) : "0"(nr), "b"(a), "c"(b), "d"(c), "S"(d), "D"(0) : "memory");
    return result;
}

static unsigned now_us(void)
{
    struct {
        int seconds, nanoseconds;
    } now;
    call(CLOCK_GETTIME, 1, (int)&now, 0, 0);
    return now.seconds * 1000000u + now.nanoseconds / 1000;
}

/* Return how often this process has left its processor to wait. */
static unsigned switches(void)
{
    int usage[18];
    call(GETRUSAGE, 0, (int)usage, 0, 0);
    return usage[16]; /* ru_nvcsw */
}

static void say(const char *text)
{
    int length = 0;
    while (text[length])
        length++;
    call(WRITE, 1, (int)text, length, 0);
}

static void say_number(unsigned number)
{
    char digits[12] = {0};
    int at = sizeof digits - 1;
    do
        digits[--at] = '0' + number % 10;
    while (number /= 10);
    say(digits + at);
}

static unsigned number(const char *text)
{
    unsigned value = 0;
    while (*text)
        value = value * 10 + *text++ - '0';
    return value;
}

static void wait_us(unsigned us, int is_time64)
{
    int time[2] = {us / 1000000, us % 1000000 * 1000};
    long long time64[2] = {time[0], time[1]};
    call(is_time64 ? FUTEX_TIME64 : FUTEX, (int)&value, 128 /* FUTEX_WAIT, private */, value,
         is_time64 ? (int)time64 : (int)time);
}

static void name_itself(char **environment)
{
    static const char name[] = "LOCKD_COMM=";
    for (; *environment; environment++) {
        unsigned at = 0;
        while (name[at] && (*environment)[at] == name[at])
            at++;
        if (!name[at])
            call(PRCTL, 15 /* PR_SET_NAME */, (int)*environment + at, 0, 0);
    }
}

__attribute__((used)) static void run(int *stack)
{
    char **arguments = (char **)(stack + 1), byte;
    int count = *stack;
    unsigned k = count > 1 ? number(arguments[1]) : 50, us = count > 2 ? number(arguments[2]) : 2000;

    name_itself(arguments + count + 1);
    say("ready ");
    say_number(call(GETPID, 0, 0, 0, 0));
    say("\n");
    call(READ, 0, (int)&byte, 1, 0);
    unsigned began = now_us(), switched = switches();
    for (unsigned i = 0; i < k; i++)
        wait_us(us, i % 2);
    unsigned slept = switches() - switched, took = now_us() - began;
    say("{\"blocked\": ");
    say_number(slept);
    say(", \"us\": ");
    say_number(took);
    say("}\n");
    while (call(READ, 0, (int)&byte, 1, 0) > 0)
        ;
    call(EXIT, 0, 0, 0, 0);
}

__attribute__((naked)) void _start(void)
{
    __asm__("mov %esp, %eax\n push %eax\n call run\n");
}
#else
int main(void)
{
    return 77; /* this machine has no such programs */
}
#endif
