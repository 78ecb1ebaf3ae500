/* A compiler at run time: a function written into anonymous memory takes a mutex on the heap, and
 * /tmp/perf-PID.map has its name. */
#include "program.h"
#include "workload.h"

static pthread_mutex_t *mutex;
static int (*compiled)(pthread_mutex_t *);

/* push rbp; mov rbp, rsp; movabs rax, CALLED; call rax; pop rbp; ret. On arm64: stp x29, x30, [sp, -16]!;
 * mov x29, sp; ldr x9, .+16; blr x9; ldp x29, x30, [sp], 16; ret; CALLED. */
#ifdef __x86_64__
static const unsigned char BEFORE[] = {0x55, 0x48, 0x89, 0xe5, 0x48, 0xb8},
                           AFTER[] = {0xff, 0xd0, 0x5d, 0xc3};
enum { CALLED_AT = sizeof BEFORE, SIZE = CALLED_AT + 8 + sizeof AFTER };
#else
static const uint32_t BEFORE[] = {0xa9bf7bfd, 0x910003fd, 0x58000089, 0xd63f0120, 0xa8c17bfd, 0xd65f03c0};
enum { CALLED_AT = sizeof BEFORE, SIZE = CALLED_AT + 8 };
#endif

static void compile(void)
{
    uintptr_t called = (uintptr_t)pthread_mutex_lock;
    char *code = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), path[64];
    if (code == MAP_FAILED)
        die("mmap");
    memcpy(code, BEFORE, sizeof BEFORE);
    memcpy(code + CALLED_AT, &called, sizeof called);
#ifdef __x86_64__
    memcpy(code + CALLED_AT + 8, AFTER, sizeof AFTER);
#endif
    check(mprotect(code, 4096, PROT_READ | PROT_EXEC), "mprotect");
    __builtin___clear_cache(code, code + SIZE);
    compiled = (int (*)(pthread_mutex_t *))code;
    snprintf(path, sizeof path, "/tmp/perf-%d.map", getpid());
    FILE *map = fopen(path, "w");
    if (!map)
        die(path);
    fprintf(map, "%lx %x jit_lock_account\n", (unsigned long)code, SIZE);
    fclose(map);
}

static void take(void)
{
    if (!mutex) {
        compile();
        mutex = malloc(sizeof *mutex);
        pthread_mutex_init(mutex, NULL);
    }
    pthread_mutex_lock(mutex);
}

static void ask(void)
{
    compiled(mutex);
}

static void give(void)
{
    pthread_mutex_unlock(mutex);
}

static const struct scenario scenarios[] = {{"heap", take, ask, give, give}};

int main(int argc, char **argv)
{
    run_program(argc, argv, scenarios, sizeof scenarios / sizeof *scenarios);
}
