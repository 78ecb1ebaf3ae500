// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Captures of threads that block on a lock, from which the namer finds the name of the lock. A lock is
 * captured again when a thread blocks on it more than CAPTURED_AGAIN_NS later. */

struct lock_id {
    u64 uaddr;
    u32 tgid;
    u8 guess; /* enum futex_kind guessed from the call's arguments; another guess counts as another lock */
    u8 pad[3];
};

/* A lock that was captured. The map drops entries when others need their place. */
struct known_lock {
    u64 captured; /* time in ns */
    u8 kind; /* enum futex_kind; the sampler corrects it when the namer knows which code waits */
    u8 is_many; /* 1: a Java class whose objects are counted one by one */
    u8 pad[6];
};

BPF_TABLE("hash", struct lock_id, struct capture, captures_0, CAPTURES_ENTRIES);
BPF_TABLE("hash", struct lock_id, struct capture, captures_1, CAPTURES_ENTRIES);
BPF_ARRAY_OF_MAPS(captures, "captures_0", 2);
BPF_TABLE("lru_hash", struct lock_id, struct known_lock, known_locks, KNOWN_LOCKS_ENTRIES);

/* Capture the current thread for the lock `id`, unless the window already has a capture for the lock. Return
 * whether the window has one now. */
static __always_inline bool keep_capture(void *ctx, u64 task, struct lock_id *id)
{
    int window = current_window();
    u32 zero = 0;
    void *map = captures.lookup(&window);
    struct capture *blank = no_capture.lookup(&zero);

    if (!map || !blank)
        return false;
    bool of_process = is_of_process(id->tgid, false);
    if (of_process) /* drain soon: the process may end, and then its lock gets no name */
        end_window_soon(window);
    if (add_entry(WRITTEN_CAPTURES, window, map, id, blank, of_process)) {
        if (bpf_map_lookup_elem(map, id))
            return true;
        lose(LOSS_STACKS__CAPTURES_FULL);
        return false;
    }
    struct capture *kept = bpf_map_lookup_elem(map, id);
    if (!kept)
        return false;
    fill_capture(ctx, task, kept);
    return true;
}
