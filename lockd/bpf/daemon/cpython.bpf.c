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
#endif
