// The first program of a machine. It loads the modules that the disk needs, and mounts the disk. Then it runs
// what the kernel's `init=` names or, without that, is process 1 of a system with one service, agent.py.

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void die(const char *what)
{
    printf("init: %s: %s\n", what, strerror(errno));
    fflush(stdout);
    sync();
    reboot(RB_AUTOBOOT); // this ends QEMU
}

static void must(int result, const char *what)
{
    if (result < 0)
        die(what);
}

static void mounted(const char *type, const char *place, const char *options)
{
    mkdir(place, 0755);
    must(mount(type, place, type, 0, options), place);
}

static void load_modules(void)
{
    struct dirent **found;
    int count = scandir("/modules", &found, NULL, alphasort); // numbers come first in their names

    must(count, "/modules");
    for (int i = 0; i < count; i++) {
        if (found[i]->d_name[0] == '.')
            continue;
        char path[512];
        snprintf(path, sizeof(path), "/modules/%s", found[i]->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        must(fd, path);
        must(syscall(SYS_finit_module, fd, "", 0), path);
        close(fd);
    }
}

static void wait_for(const char *path)
{
    for (int tries = 0; access(path, F_OK); tries++) {
        if (tries == 3000)
            die(path);
        usleep(10000);
    }
}

static void switch_root(void)
{
    must(mount("/dev", "/root/dev", NULL, MS_MOVE, NULL), "/root/dev");
    must(chdir("/root"), "/root");
    must(mount(".", "/", NULL, MS_MOVE, NULL), "/root over /");
    must(chroot("."), "chroot");
    must(chdir("/"), "/");
}

static void loopback_up(void)
{
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int fd = socket(AF_INET, SOCK_DGRAM, 0);

    must(fd, "socket");
    must(ioctl(fd, SIOCSIFFLAGS, &request), "lo");
    close(fd);
}

static void be_process_1(int agent_text)
{
    char path[64];

    mounted("tmpfs", "/run", "mode=755");
    mounted("tmpfs", "/tmp", NULL);
    mounted("tmpfs", "/dev/shm", NULL);
    mounted("devpts", "/dev/pts", NULL);
    mounted("cgroup2", "/sys/fs/cgroup", NULL);
    mounted("bpf", "/sys/fs/bpf", NULL);
    mounted("debugfs", "/sys/kernel/debug", NULL);
    mounted("tracefs", "/sys/kernel/tracing", NULL);
    loopback_up();

    pid_t agent = fork();
    must(agent, "fork");
    if (agent == 0) {
        setsid();
        snprintf(path, sizeof(path), "/proc/self/fd/%d", agent_text);
        execl("/usr/bin/python3", "python3", path, NULL);
        die("python3");
    }
    for (;;) {
        int status;
        pid_t ended = wait(&status); // or a process that has lost its parent
        if (ended == agent) {
            errno = 0;
            printf("init: agent ended with status %x\n", status);
            die("agent");
        }
    }
}

int main(void)
{
    char line[4096];

    mounted("devtmpfs", "/dev", NULL);
    int console = open("/dev/console", O_RDWR);
    for (int fd = 0; fd < 3; fd++)
        dup2(console, fd);
    mounted("proc", "/proc", NULL);
    load_modules();
    wait_for("/dev/vda");
    mkdir("/root", 0755);
    must(mount("/dev/vda", "/root", "ext4", MS_NOATIME, NULL), "/dev/vda");
    if (!access("/dev/vdb", F_OK))
        must(mount("/dev/vdb", "/root/work", "ext4", MS_NOATIME, NULL), "/dev/vdb");

    int agent = open("/agent.py", O_RDONLY); // it has no path any more once the root is switched
    must(agent, "/agent.py");
    FILE *file = fopen("/proc/cmdline", "r");
    if (!file || !fgets(line, sizeof(line), file))
        die("/proc/cmdline");
    fclose(file);
    must(umount("/proc"), "/proc");
    switch_root();

    char *init = strstr(line, " init=");
    if (init) {
        init = strtok(init + strlen(" init="), " \n");
        execl(init, init, NULL);
        die(init);
    }
    mounted("proc", "/proc", NULL);
    mounted("sysfs", "/sys", NULL);
    setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin", 1);
    setenv("HOME", "/root", 1);
    be_process_1(agent);
}
