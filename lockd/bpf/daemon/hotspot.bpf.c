// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Locks of Java threads. Each Java thread sleeps on a word of its own, so that the address of the futex
 * does not identify the lock (see names/runtimes/hotspot.py). */

/* Places in the memory of a process that runs HotSpot; offsets in bytes. */
struct hotspot {
    u64 oop_base; /* base of compressed (32-bit) pointers to objects */
    u32 module; /* libjvm's place in a thread's vector of pointers to thread-local memory (DTV) */
    u32 current_thread; /* in libjvm's thread-local memory: a pointer to the JavaThread */
    u32 thread_object; /* in a JavaThread: a handle of its java.lang.Thread */
    u32 current_object; /* in a JavaThread: a handle of the virtual thread that it runs */
    u32 pending_monitor; /* in a JavaThread: the ObjectMonitor that it wants to enter */
    u32 waiting_monitor; /* in a JavaThread: the ObjectMonitor that it waits on, by wait() */
    u32 eetop; /* in a java.lang.Thread: a pointer back to the JavaThread */
    u32 blocker; /* in a java.lang.Thread: the object given to LockSupport.park() */
    u32 klass; /* in any object: its compressed class pointer, 32 bits */
    u8 oop_shift;
    u8 klass_shift;
    u8 is_wide; /* 1: pointers to objects have 64 bits */
    u8 generation;
};

/* Numbers that replace the address of a lock. The highest bits say what the number is. */
#define JAVA_WAIT (1ULL << 63) /* set in all these numbers */
#define JAVA_OBJECT JAVA_WAIT /* a class, or one object of it */
#define JAVA_WORD (3ULL << 62) /* the word that the thread sleeps on, if nothing else is known */
#define JAVA_MONITOR (7ULL << 61)
#define JAVA_ADDRESS ((1ULL << 48) - 1)
#define JAVA_GENERATION_AT 48
#define JAVA_OBJECT_GENERATION_AT 60
#define JAVA_CLASS_AT 32
#define JAVA_CLASSES (1 << 28)

BPF_TABLE("lru_hash", u32, struct hotspot, hotspots, HOTSPOTS_ENTRIES);

/* Return the address of the JavaThread of the current thread, or 0 if it is no Java thread: then what is read
 * as its java.lang.Thread does not point back to what is read as its JavaThread. */
static __always_inline u64 java_thread(u64 thread_pointer, struct hotspot *vm)
{
    u64 block = user_word(user_word(thread_pointer + 8) + vm->module);
    u64 thread = user_word(block + vm->current_thread);
    u64 object = user_word(user_word(thread + vm->thread_object));

    return object && user_word(object + vm->eetop) == thread ? thread : 0;
}

/* The current thread, whose entry is `t`, blocks in a futex call. If it is a Java thread, replace the address
 * of the futex in `t->call` by a number for what it waits for. */
static __always_inline void see_java_wait(struct thread *t)
{
    struct call *call = &t->call;
    u32 tgid = t->tgid;

    if (call->guess != KIND_COND || call->uaddr & JAVA_WAIT) /* HotSpot's own mutexes keep their addresses */
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
