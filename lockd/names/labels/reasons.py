"""Why a thread is off the CPU: a closed list of reasons, from its system call and state."""

from __future__ import annotations

import os

REASONS = {
    "lock": "a futex that is a lock or a priority-inheritance lock; also a lock of PostgreSQL's, of a row or"
    " table, that a backend waits for as its title says",
    "cond": "a futex that is a condition variable, a semaphore, a join: waits for work",
    "futex": "a futex whose kind is not known",
    "sleep": "nanosleep and clock_nanosleep",
    "poll": "poll, select, epoll_wait and their kin, also if for a timeout only",
    "socket": "sending, receiving, connecting, accepting on a socket, also by read, write, sendfile, splice",
    "pipe": "reading from or writing to a pipe or FIFO",
    "event": "reading an eventfd, timerfd, signalfd, inotify, fanotify, userfaultfd: waits for work",
    "device": "reading from or writing to a character device: a terminal, /dev/fuse; any ioctl; getrandom",
    "file": "opening (also a FIFO), reading, writing, syncing, naming, mounting files, without a disk",
    "file_lock": "flock and fcntl locks",
    "disk": "block I/O, whatever the system call (the task's in_iowait bit); but not waiting for io_uring",
    "child": "wait for a child process; the parent of a vfork",
    "signal": "waiting for a signal",
    "io_uring": "waiting for requests of io_uring or Linux AIO, whatever they are about",
    "ipc": "System V and POSIX message queues and semaphores",
    "fault": "a page fault or another trap in user code, without disk: a kernel lock, userfaultfd",
    "stopped": "stopped by a signal or a tracer, or frozen: by its cgroup (docker pause) or a suspend",
    "kernel": "uninterruptible without I/O: a kernel lock, RCU, a completion",
    "kthread": "a kernel thread that waits for work",
    "other": "any other system call, and every one of a 32-bit program",
}
"""Every value of the label `reason`, with its definition."""

_CALLS = {
    "futex": "futex:202:98 futex_waitv:449:449 futex_wait:455:455",
    "sleep": "nanosleep:35:101 clock_nanosleep:230:115 restart_syscall:219:128",
    "poll": """
        poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_wait:232:- epoll_pwait:281:22
        epoll_pwait2:441:441
    """,
    "socket": """
        accept:43:202 accept4:288:242 connect:42:203 sendto:44:206 sendmsg:46:211 sendmmsg:307:269
        recvfrom:45:207 recvmsg:47:212 recvmmsg:299:243 shutdown:48:210 getsockopt:55:209 setsockopt:54:208
    """,
    "pipe": "tee:276:77 vmsplice:278:75",
    "read": """
        read:0:63 write:1:64 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69
        pwritev:296:70 preadv2:327:286 pwritev2:328:287 sendfile:40:71 splice:275:76
    """,
    "file": """
        open:2:- openat:257:56 openat2:437:437 creat:85:- open_by_handle_at:304:265 close:3:57
        close_range:436:436 stat:4:- lstat:6:- fstat:5:80 newfstatat:262:79 statx:332:291 statfs:137:43
        fstatfs:138:44 access:21:- faccessat:269:48 faccessat2:439:439 readlink:89:- readlinkat:267:78
        getdents:78:- getdents64:217:61 chdir:80:49 fchdir:81:50 chroot:161:51 lseek:8:62
        copy_file_range:326:285 readahead:187:213 fadvise64:221:223 fallocate:285:47 truncate:76:45
        ftruncate:77:46 sync:162:81 syncfs:306:267 fsync:74:82 fdatasync:75:83 sync_file_range:277:84
        msync:26:227 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36 unlink:87:- unlinkat:263:35
        rename:82:- renameat:264:38 renameat2:316:276 mkdir:83:- mkdirat:258:34 rmdir:84:- mknod:133:-
        mknodat:259:33 chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92:- lchown:94:-
        fchown:93:55 fchownat:260:54 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88
        getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7
        listxattr:194:11 llistxattr:195:12 flistxattr:196:13 removexattr:197:14 lremovexattr:198:15
        fremovexattr:199:16 name_to_handle_at:303:264 inotify_add_watch:254:27 fanotify_mark:301:263
        mount:165:40 umount2:166:39 move_mount:429:429 open_tree:428:428 fsopen:430:430 fsconfig:431:431
        fsmount:432:432 fspick:433:433 mount_setattr:442:442 pivot_root:155:41 swapon:167:224
        swapoff:168:225 quotactl:179:60 quotactl_fd:443:443 execve:59:221 execveat:322:281
    """,
    "file_lock": "flock:73:32 fcntl:72:25",
    "child": "wait4:61:260 waitid:247:95",
    "clone": "clone:56:220 clone3:435:435",
    "vfork": "vfork:58:-",
    "signal": "pause:34:- rt_sigsuspend:130:133 rt_sigtimedwait:128:137",
    "io_uring": """
        io_uring_setup:425:425 io_uring_enter:426:426 io_uring_register:427:427 io_submit:209:2
        io_getevents:208:4 io_pgetevents:333:292 io_destroy:207:1
    """,
    "ipc": """
        msgsnd:69:189 msgrcv:70:188 semop:65:193 semtimedop:220:192 mq_timedsend:242:182
        mq_timedreceive:243:183
    """,
    "device": "ioctl:16:29 syslog:103:116 getrandom:318:278",
}
"""What system calls wait for: name:number:number, on x86-64 and arm64 (`-`: is not there).

Of `read` it depends on the file, of `clone` on whether it is a vfork; these are no reasons. Here is what can
sleep so that a signal wakes it, be it only on FUSE or autofs. All other waits are uninterruptible, and so
`kernel` whatever the call."""

_MACHINES = ("x86_64", "aarch64")
_FILES = {
    "regular": "file",
    "pipe": "pipe",
    "socket": "socket",
    "device": "device",
    "event": "event",
}
_KINDS = {"lock": "lock", "pi": "lock", "cond": "cond"}


def calls(machine: str) -> dict[int, tuple[str, str]]:
    """Group and name of each system call in the list, by its number on `machine`."""
    column = 1 + _MACHINES.index(machine)
    listed = ((group, call.split(":")) for group, text in _CALLS.items() for call in text.split())
    return {int(call[column]): (group, call[0]) for group, call in listed if call[column] != "-"}


class Reasons:
    """Reasons by what the programs note of a wait. `enums` and `constants` are the C sources'."""

    def __init__(
        self,
        enums: dict[str, tuple[str, ...]],
        constants: dict[str, int],
        machine: str = os.uname().machine,
    ) -> None:
        self._group = {nr: group for nr, (group, _) in calls(machine).items()}
        self._enums = enums
        self._no_call, self._kernel_thread = constants["NR_NONE"], constants["NR_KERNEL"]

    def reason(self, nr: int, state: int, iowait: bool, detail: int) -> str:
        """`detail` is an enum futex_kind, file_kind, clone_kind or poll_kind, if the call is one of those."""
        state_name = self._enums["state"][state]
        group = self._group.get(nr, "other")
        is_uninterruptible = state_name == "uninterruptible"
        # Since 8a796565cec3 (6.5) whoever waits for requests of io_uring has the bit, be they for sockets.
        if iowait and (group != "io_uring" or is_uninterruptible):
            return "disk"
        if nr == self._kernel_thread:
            return "kernel" if is_uninterruptible else "kthread"
        if state_name == "other":
            return "stopped"
        if group == "vfork" or (group == "clone" and self._is("and_wait", "clone_kind", detail)):
            return "child"  # is uninterruptible
        if is_uninterruptible:
            return "fault" if nr == self._no_call else "kernel"
        if group == "futex":
            return self._named(_KINDS, "futex_kind", detail, "futex")
        if group == "read":
            return self._named(_FILES, "file_kind", detail, "other")
        if group == "poll" and self._is("for_lock", "poll_kind", detail):
            return "lock"
        return "fault" if nr == self._no_call else group if group in REASONS else "other"

    def _is(self, member: str, enum: str, detail: int) -> bool:
        return self._named({member: member}, enum, detail, "") == member

    def _named(self, words: dict[str, str], enum: str, detail: int, default: str) -> str:
        members = self._enums.get(enum, ())
        return words.get(members[detail], default) if detail < len(members) else default
