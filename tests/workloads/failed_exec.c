/* K processes, one after another. A thread that is not the leader calls exec in each, and so takes over the
 * leader's id. Then the kernel finds that it cannot load the program: it kills the thread by SIGSEGV.
 * "failed" is in how many of the processes that happened. */
#include "workload.h"
#include <elf.h>
#include <sys/resource.h>

enum { MOST = 1 << 24, APART_US = 2000 };

static int program;

/* This program, with segments that are larger in the file than they are to be in memory. */
static int broken_program(void)
{
    static char content[MOST];
    int self = check(open("/proc/self/exe", O_RDONLY | O_CLOEXEC), "open /proc/self/exe");
    int broken = check(memfd_create("broken", MFD_CLOEXEC), "memfd_create");
    ssize_t size = check(read(self, content, sizeof content), "read /proc/self/exe");
    Elf64_Ehdr *head = (void *)content;
    Elf64_Phdr *segments = (void *)(content + head->e_phoff);
    for (int i = 0; i < head->e_phnum; i++)
        if (segments[i].p_type == PT_LOAD)
            segments[i].p_memsz = 0;
    if (write(broken, content, size) != size)
        die("write memfd");
    close(self);
    return broken;
}

static void *exec(void *unused)
{
    static char *const words[] = {"broken", NULL};
    struct rusage usage;
    do { /* until it has left its CPU, which a busy host may delay beyond the nap's end */
        nap(APART_US);
        check(getrusage(RUSAGE_THREAD, &usage), "getrusage");
    } while (!usage.ru_nvcsw); /* it is known by its own id from now on, and the leader has ended */
    syscall(SYS_execveat, program, "", words, words + 1, AT_EMPTY_PATH);
    die("exec");
    return unused;
}

static _Noreturn void fail(void)
{
    spawn(exec, NULL);
    for (;;)
        syscall(SYS_exit, 0); /* of this thread alone */
}

int main(int argc, char **argv)
{
    long k = arg(argc, argv, 1, 50), failed = 0;
    struct rlimit none = {0, 0};
    check(setrlimit(RLIMIT_CORE, &none), "setrlimit");
    program = broken_program();
    ready();
    for (long i = 0; i < k; i++) {
        int status;
        pid_t pid = check(fork(), "fork");
        if (!pid)
            fail();
        check(waitpid(pid, &status, 0), "waitpid");
        failed += WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
    }
    say("{\"failed\": %ld}", failed);
    finish();
}
