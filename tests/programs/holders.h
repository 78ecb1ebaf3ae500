/* Three functions hold one lock, for 5, 20 and 75 of 100 parts of the time, while other threads ask for it.
 * The program knows for how long each made them wait. README.md describes the protocol. */
#ifndef HOLDERS_H
#define HOLDERS_H
#ifdef __cplusplus
extern "C" {
#endif

enum { SHORT, SOME, LONG, HOLDERS };

/* A lock: the functions that hold it, and the function that asks for it. Each calls held() with the lock
 * held. */
struct held_lock {
    const char *name;
    void (*hold[HOLDERS])(void);
    void (*ask)(void);
};

void held(int which); /* HOLDERS: by a thread that asked for the lock and has got it */
void run_holders(int argc, char **argv, const struct held_lock *locks, int count);

/* The functions of a lock NAME: NAME_short, NAME_some, NAME_long, NAME_ask. */
#define HOLDER(name, which, take, give)                                                                      \
    __attribute__((noinline)) static void name(void)                                                         \
    {                                                                                                        \
        take;                                                                                                \
        held(which);                                                                                         \
        give;                                                                                                \
        __asm__ volatile("");                                                                                \
    }
#define HELD_LOCK(name, take, give)                                                                          \
    HOLDER(name##_short, SHORT, take, give)                                                                  \
    HOLDER(name##_some, SOME, take, give)                                                                    \
    HOLDER(name##_long, LONG, take, give)                                                                    \
    HOLDER(name##_ask, HOLDERS, take, give)
#define NAMED(name) {#name, {name##_short, name##_some, name##_long}, name##_ask}

#ifdef __cplusplus
}
#endif
#endif
