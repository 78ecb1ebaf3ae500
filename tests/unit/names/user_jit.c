// A thread named jit waits for a mutex that code calls for which is written as the program runs. The program
// says where that code will be, and writes it when there is something on its input, or the end of it.

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static void *code;

// push %rbp; mov %rsp,%rbp; mov %rdi,%rax; mov %rsi,%rdi; call *%rax; pop %rbp; ret
static const char BYTES[] = "\x55\x48\x89\xe5\x48\x89\xf8\x48\x89\xf7\xff\xd0\x5d\xc3";

__attribute__((noinline)) void *run(void *unused)
{
    prctl(PR_SET_NAME, "jit");
    ((void (*)(int (*)(pthread_mutex_t *), pthread_mutex_t *))code)(pthread_mutex_lock, &mutex);
    __asm__ volatile("");
    return unused;
}

int main(void)
{
    pthread_t thread;

    code = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    printf("%lx\n", (unsigned long)code);
    fflush(stdout);
    getchar();
    memcpy(code, BYTES, sizeof BYTES);
    if (mprotect(code, 4096, PROT_READ | PROT_EXEC))
        return 1;
    pthread_mutex_lock(&mutex);
    pthread_create(&thread, NULL, run, NULL);
    pause();
    return 0;
}
