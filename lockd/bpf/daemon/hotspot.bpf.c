/* What threads of Java wait for: each sleeps on a word of its own, so that tells nothing. See
 * names/runtimes/hotspot.py. */

/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */

/* Where HotSpot has it in the memory of a process; offsets in bytes. */
struct hotspot {
    u64 oop_base; /* of pointers to objects that have 32 bits */
    u32 module; /* libjvm's, in a thread's vector of thread-local memory */
    u32 current_thread; /* in that: a pointer to its JavaThread */
    u32 thread_object; /* in a JavaThread: a handle of the object that stands for it in Java, */
    u32 current_object; /* and of the virtual thread that it runs */
    u32 pending_monitor; /* an ObjectMonitor that it wants to enter, */
    u32 waiting_monitor; /* or has called wait() of */
    u32 eetop; /* in such an object: a pointer back to the JavaThread */
    u32 blocker; /* a pointer to what LockSupport.park() was given */
    u32 klass; /* in any object: its class, 32 bits */
    u8 oop_shift;
    u8 klass_shift;
    u8 is_wide; /* whether pointers to objects have 64 bits */
    u8 generation;
};

/* What stands for the address of a lock: the highest bits tell what it is. */
#define JAVA_WAIT (1ULL << 63)
#define JAVA_OBJECT JAVA_WAIT /* a class, and perhaps one object of it */
#define JAVA_WORD (3ULL << 62) /* nothing is known: the word the thread sleeps on */
#define JAVA_MONITOR (7ULL << 61)
#define JAVA_ADDRESS ((1ULL << 48) - 1)
#define JAVA_GENERATION_AT 48
#define JAVA_OBJECT_GENERATION_AT 60
#define JAVA_CLASS_AT 32
#define JAVA_CLASSES (1 << 28)

BPF_TABLE("lru_hash", u32, struct hotspot, hotspots, HOTSPOTS_ENTRIES);

static __always_inline u64 user_word(u64 at)
{
    u64 word = 0;

    bpf_probe_read_user(&word, sizeof(word), (void *)at);
    return word;
}

static __always_inline u32 user_half(u64 at)
{
    u32 half = 0;

    bpf_probe_read_user(&half, sizeof(half), (void *)at);
    return half;
}

/* The JavaThread of the current thread; 0 if it is not of Java, as its object does not point back to it. */
static __always_inline u64 java_thread(u64 thread_pointer, struct hotspot *vm)
{
    u64 block = user_word(user_word(thread_pointer + 8) + vm->module);
    u64 thread = user_word(block + vm->current_thread);
    u64 object = user_word(user_word(thread + vm->thread_object));

    return object && user_word(object + vm->eetop) == thread ? thread : 0;
}

/* The current thread blocks in a call: if it is of a Java machine, let what it waits for stand for the
 * address. */
static __always_inline void see_java_wait(struct thread *t)
{
    struct call *call = &t->call;
    u32 tgid = t->tgid;

    if (call->guess != KIND_COND || call->uaddr & JAVA_WAIT) /* mutexes of HotSpot's own are what they are */
        return;
    struct hotspot *vm = hotspots.lookup(&tgid);
    u64 thread = vm ? java_thread(t->thread_pointer, vm) : 0;
    if (!vm || !thread)
        return;

    u64 generation = vm->generation, monitor = user_word(thread + vm->pending_monitor);
    if (monitor)
        call->guess = KIND_LOCK;
    else
        monitor = user_word(thread + vm->waiting_monitor);
    if (monitor) {
        call->uaddr = JAVA_MONITOR | generation << JAVA_GENERATION_AT | (monitor & JAVA_ADDRESS);
        return;
    }
    u64 at = user_word(user_word(thread + vm->current_object)) + vm->blocker;
    u64 narrow = vm->is_wide ? user_word(at) >> 3 : user_half(at);
    u64 object = vm->is_wide ? narrow << 3 : vm->oop_base + (narrow << vm->oop_shift);
    u64 klass = narrow ? ((u64)user_half(object + vm->klass) << vm->klass_shift) >> 3 : 0;
    if (!klass || klass >= JAVA_CLASSES) {
        call->uaddr = JAVA_WORD | generation << JAVA_GENERATION_AT | (call->uaddr & JAVA_ADDRESS);
        return;
    }
    call->uaddr = JAVA_OBJECT | generation << JAVA_OBJECT_GENERATION_AT | klass << JAVA_CLASS_AT;
    struct lock_id id = {.uaddr = call->uaddr, .tgid = tgid, .guess = call->guess};
    struct known_lock *known = known_locks.lookup(&id);
    if (known && known->is_many) {
        call->guess = known->kind;
        call->uaddr |= (u32)narrow;
    }
}
