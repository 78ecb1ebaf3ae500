// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* The Python functions that a thread is in while it releases a lock or begins to wait. Only the interpreter's
 * memory says which they are, and only until the thread runs on (see names/runtimes/cpython.py). */

#ifndef TRACE
/* Places in the memory of a process that runs CPython; offsets in bytes. */
struct cpython {
    u64 last_holder; /* address of the pointer to the state of the thread that last got the GIL */
    u32 thread_id; /* in a thread's state: its id, pthread_self(); see PYTHON_THREAD_BYTES */
    u32 thread_frame; /* in a thread's state: a pointer to its innermost frame, or to a cframe */
    u32 has_cframe; /* 1: `thread_frame` points to a cframe */
    u32 cframe_frame; /* in a cframe: a pointer to the innermost frame */
    u32 frame_previous; /* in a frame: a pointer to the frame of the caller */
    u32 frame_code; /* in a frame: a pointer to the code object of its function */
};

#define PYTHON_THREAD_BYTES 4096 /* arm64: a thread pointer is the thread's id plus fewer bytes than this */

BPF_TABLE("lru_hash", u32, struct cpython, cpythons, CPYTHONS_ENTRIES);

/* By thread id, the address of the thread's state in the memory of its process. */
BPF_TABLE("lru_hash", u32, u64, python_threads, PYTHON_THREADS_ENTRIES);

/* Whether the Python thread state at the address `state` is that of the current thread, which has this thread
 * pointer. */
static __always_inline bool is_own_state(struct cpython *vm, u64 state, u64 thread_pointer)
{
    u64 id = user_word(state + vm->thread_id);

    return id && thread_pointer - id < PYTHON_THREAD_BYTES;
}

/* Return the address of the current thread's Python thread state, or 0 if it is not known. It becomes known
 * when this function is called while the thread is the last one that got the GIL. */
static __always_inline u64 python_state(struct cpython *vm, u64 thread_pointer)
{
    u32 tid = bpf_get_current_pid_tgid();
    u64 state = user_word(vm->last_holder), *known = python_threads.lookup(&tid);

    if (is_own_state(vm, state, thread_pointer)) {
        if (!known || *known != state)
            python_threads.update(&tid, &state);
        return state;
    }
    state = known ? *known : 0;
    return state && is_own_state(vm, state, thread_pointer) ? state : 0;
}

/* Fill `codes` with the addresses of the code objects of the current thread's functions, innermost first and
 * at most `most`. The rest of `codes` is 0. If the thread's state is not known, all of `codes` is 0. */
static __always_inline void read_python_functions(u64 thread_pointer, u64 *codes, u32 most)
{
    u32 tgid = bpf_get_current_pid_tgid() >> 32;
    struct cpython *vm = cpythons.lookup(&tgid);

    __builtin_memset(codes, 0, most * sizeof(*codes));
    u64 state = vm ? python_state(vm, thread_pointer) : 0;
    if (!vm || !state)
        return;
    u64 frame = user_word(state + vm->thread_frame);
    if (vm->has_cframe)
        frame = user_word(frame + vm->cframe_frame);
#pragma unroll
    for (u32 i = 0; i < most; i++) {
        if (!frame)
            break;
        codes[i] = user_word(frame + vm->frame_code);
        frame = user_word(frame + vm->frame_previous);
    }
}

#ifdef WITH_USER_HOLDERS
/* The struct of the GIL begins with four words, the second of which is the pointer at `last_holder`. Then
 * come two pairs of a condition variable and a mutex of glibc. Threads that want the GIL wait on the first
 * pair, and a thread that has given up the GIL waits on the second. The numbers are offsets in bytes from the
 * beginning of the struct, on x86-64: of the words on which threads sleep, in the condition variables of any
 * version of glibc. GIL_END is the size of the struct or more. */
#define GIL_WANTED 64
#define GIL_WANTED_END 80
#define GIL_SWITCHES 152
#define GIL_SWITCHES_END 168
#define GIL_END 224

/* A thread that has waited for the GIL for some milliseconds asks the holder to give it up, and waits again.
 * Until the GIL is given up, no thread is charged with such waits. They are added up here, by process. */
struct gil_waits {
    u64 waited; /* ns */
    u64 last; /* time at which the last of the waits ended */
    u32 tid; /* the thread whose wait ended at `last` */
    u32 pad;
};

#define GIL_ASKED_NS 100000 /* within this time after a thread has asked, the holder gives up the GIL */
#define GIL_WAITS_NS 1000000000 /* if `last` is longer ago than this, the GIL was given up unseen */

BPF_TABLE("lru_hash", u32, struct gil_waits, gil_waits, CPYTHONS_ENTRIES);

/* Return the offset in bytes, in the struct of the GIL, of the word on which `t` waits; GIL_END if it waits
 * for anything else. By their arguments, waits for the GIL are waits for a condition variable. */
static __always_inline u64 place_in_gil(struct thread *t)
{
    u32 tgid = t->tgid;

    if (t->call.guess != KIND_COND)
        return GIL_END;
    struct cpython *vm = cpythons.lookup(&tgid);
    u64 at = vm ? t->call.uaddr - (vm->last_holder - sizeof(u64)) : GIL_END;
    return at < GIL_END ? at : GIL_END;
}

/* Add up a wait of the thread `tid`, whose entry is `t`, for the GIL. The wait has ended at `now` after
 * `waited` ns, but not because the GIL was given up. */
static __always_inline void add_gil_wait(u32 tid, struct thread *t, u64 waited, u64 now)
{
    u32 tgid = t->tgid;
    struct gil_waits none = {}, *sum = gil_waits.lookup_or_try_init(&tgid, &none);

    if (!sum)
        return;
    add_to(&sum->waited, waited);
    sum->last = now;
    sum->tid = tid;
}

/* The current thread `tid` gives up the GIL at `now`. `sum` says for how long threads have waited for the
 * GIL. Reset it, and return for how many ns they have waited because of this thread. */
static __always_inline u64 take_gil_waits(u32 tid, struct gil_waits *sum, u64 now)
{
    s64 waited = sum->waited;

    if (waited <= 0) /* below 0 for a short time if two CPUs have reset it at once */
        return 0;
    add_to(&sum->waited, -waited);
    /* If the last wait is too old, or was one of this thread, another thread has given up the GIL unseen. */
    return now - sum->last < GIL_WAITS_NS && sum->tid != tid ? waited : 0;
}
#endif
#endif
