/* What a program of scenarios is made of, for C and C++: each scenario is one lock that one thread, the
 * asker, waits for again and again, because the main thread has taken it. README.md has the protocol. */
#ifndef PROGRAM_H
#define PROGRAM_H
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

/* take and give are called by the main thread, ask and done by the asker. ask is the call site. Each may be
 * absent, but for ask. */
struct scenario {
    const char *name;
    void (*take)(void);
    void (*ask)(void);
    void (*give)(void);
    void (*done)(void);
};

/* `PROGRAM SCENARIO [ROUNDS=40] [HOLD_US=50000]`: speaks the protocol and does not return. */
void run_program(int argc, char **argv, const struct scenario *scenarios, size_t count);

/* Runs `run` in a thread of its own, which nobody joins; returns once it runs. */
void in_thread(void (*run)(void));
/* Sleeps until *value is what is wanted, without a futex. */
void until(const volatile int *value, int wanted);

#ifdef __cplusplus
}
#endif
#endif
