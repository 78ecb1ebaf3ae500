/* The user side of threads as they block on a lock, to be unwound and named: now and then for each lock. */

/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */

struct lock_id {
    u64 uaddr;
    u32 tgid;
    u8 guess; /* enum futex_kind, by the call's arguments; of another guess it is another lock */
    u8 pad[3];
};

/* A lock that was captured, until others take its place. */
struct known_lock {
    u64 captured; /* when */
    u8 kind; /* enum futex_kind; the sampler corrects it when it knows what the code is */
    u8 is_many; /* stands for a class of Java whose objects are to be told apart */
    u8 pad[6];
};

BPF_TABLE("hash", struct lock_id, struct capture, captures_0, CAPTURES_ENTRIES);
BPF_TABLE("hash", struct lock_id, struct capture, captures_1, CAPTURES_ENTRIES);
BPF_ARRAY_OF_MAPS(captures, "captures_0", 2);
BPF_TABLE("lru_hash", struct lock_id, struct known_lock, known_locks, KNOWN_LOCKS_ENTRIES);

/* Whether the current thread was captured, now or by another thread a moment ago. */
static __always_inline bool keep_capture(void *ctx, u64 task, struct lock_id *id)
{
    int window = current_window();
    u32 zero = 0;
    void *map = captures.lookup(&window);
    struct capture *blank = no_capture.lookup(&zero);

    if (!map || !blank)
        return false;
    if (bpf_map_update_elem(map, id, blank, BPF_NOEXIST)) {
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
