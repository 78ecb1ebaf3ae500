"""Names of the kernel's locks: symbols of static locks, well-known members of structures, else the locking
site.

A lock that is a member of a structure has no symbol. By RULES, the lock's type and the function that takes
the lock determine which member it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from lockd.names.kernel.kallsyms import KernelSymbols, module_ranges
from lockd.names.protocol import ANON, NO_RELEASE, UNKNOWN, KernelLock, LockAnswer

MODULES_SECONDS = 0.1
"""Seconds between two checks of which modules are loaded. There may be thousands of questions at a time."""
MMAP_LOCK = "mmap_lock"
"""The name of the lock of an address space."""

MUTEX = ("mutex",)
RWSEM = ("rwsem_read", "rwsem_write")
SPINLOCK = ("spinlock",)
"""Types of locks: values of the label `type`."""


class KernelNames:
    """Names locks of the kernel that runs. `procfs` is the root of a proc file system."""

    def __init__(self, procfs: Path = Path("/proc")) -> None:
        self._procfs = procfs
        self._symbols: KernelSymbols | None = None
        self._modules: dict[bytes, tuple[int, int]] = {}
        self._check_modules_at = 0.0

    def answer(self, question: KernelLock) -> LockAnswer:
        """The lock's name and site, and the functions of the stack in which a thread waited for the lock."""
        symbols = self.symbols()
        site = symbols.site(question.stack)
        static = symbols.variable(question.address)
        lock = static or (MMAP_LOCK if question.is_mmap_lock else "")
        for function in symbols.callers(question.stack)[:1]:
            lock = lock or member_of(question.lock_type, function) or site
        stack = symbols.describe(question.stack)
        span = (question.address, question.address) if static else symbols.gap(question.address)
        return LockAnswer(question.key, False, lock or ANON, site or UNKNOWN, stack, span=span)

    def name_holder(self, stack: tuple[int, ...]) -> tuple[str, tuple[str, ...]]:
        """The site at which a thread released a lock, and its functions, see KernelSymbols.release().

        NO_RELEASE and no functions if the stack does not show a release.
        """
        return self.symbols().release(stack) or (NO_RELEASE, ())

    def symbols(self) -> KernelSymbols:
        """The kernel's symbols, read anew when modules were loaded or unloaded."""
        if self._symbols is None or time.monotonic() >= self._check_modules_at:
            modules = module_ranges(self._procfs / "modules")
            if self._symbols is None or modules != self._modules:
                self._modules = modules
                self._symbols = KernelSymbols(self._procfs / "kallsyms", self._procfs / "modules")
            self._check_modules_at = time.monotonic() + MODULES_SECONDS
        return self._symbols


@dataclass(frozen=True)
class Rule:
    """A lock of one of `types` is `member` if it is taken by one of `functions` or by code inlined there."""

    member: str
    """The lock as a member of a structure. The member has the name that it has in the kernel's code, and the
    structure a name that is understood without the code around it."""
    types: tuple[str, ...]
    functions: str
    """Names of functions, separated by spaces. On no tested kernel do they take another lock of these types
    that has no symbol."""


RULES = (
    # memory
    Rule(
        MMAP_LOCK,
        RWSEM,
        "mmap_read_lock lock_mm_and_find_vma __access_remote_vm process_vm_rw_core get_user_pages_remote "
        "__get_user_pages_remote get_user_pages_unlocked copy_remote_vm_str m_start proc_get_vma "
        "pagemap_read do_pagemap_scan do_procmap_query show_smaps_rollup clear_refs_write "
        "proc_map_files_lookup proc_map_files_readdir map_files_get_link map_files_d_revalidate "
        "madvise_lock madvise_do_behavior do_madvise do_mprotect_pkey do_mlock __mm_populate "
        "vm_mmap_pgoff __vm_munmap __do_sys_brk __x64_sys_brk __do_sys_mremap __x64_sys_mremap "
        "__do_sys_mincore __x64_sys_mincore __do_sys_process_mrelease __x64_sys_process_mrelease "
        "kernel_get_mempolicy do_mbind do_migrate_pages migrate_to_node do_pages_move do_pages_stat "
        "ksm_scan_thread fixup_user_fault userfaultfd_register userfaultfd_unregister "
        "mmu_notifier_register mpol_rebind_mm",
    ),
    Rule(
        "mapping->i_mmap_rwsem",
        RWSEM,
        "unlink_file_vma unlink_file_vma_batch_add unlink_file_vma_batch_final unlink_file_vma_batch_process "
        "vma_link_file rmap_walk_file __rmap_walk_file unmap_mapping_pages unmap_mapping_folio "
        "unmap_mapping_page",
    ),
    Rule(
        "anon_vma->root->rwsem",
        RWSEM,
        "anon_vma_clone anon_vma_fork unlink_anon_vmas __anon_vma_prepare __put_anon_vma rmap_walk_anon "
        "folio_lock_anon_vma_read page_lock_anon_vma_read",
    ),
    Rule(
        "mapping->invalidate_lock",
        RWSEM,
        "filemap_fault filemap_get_pages page_cache_ra_unbounded page_cache_ra_order do_page_cache_ra "
        "filemap_invalidate_lock_two",
    ),
    Rule("lruvec->lru_lock", SPINLOCK, "folio_lruvec_lock folio_lruvec_lock_irq folio_lruvec_lock_irqsave"),
    Rule("zone->lock", SPINLOCK, "get_page_from_freelist __rmqueue_pcplist free_pcppages_bulk free_one_page"),
    Rule("ptl", SPINLOCK, "pte_offset_map_lock __pte_offset_map_lock"),
    # files
    Rule("file->f_pos_lock", MUTEX, "fdget_pos __fdget_pos"),
    Rule(
        "files->file_lock",
        SPINLOCK,
        "alloc_fd fd_install fd_install_slowpath expand_files put_unused_fd close_fd file_close_fd pick_file "
        "close_fd_get_file",
    ),
    Rule(
        "pipe->mutex",
        MUTEX,
        "pipe_read pipe_write anon_pipe_read anon_pipe_write pipe_lock pipe_double_lock pipe_release "
        "pipe_ioctl pipe_fcntl pipe_fasync fifo_open",
    ),
    Rule("seq_file->lock", MUTEX, "seq_read_iter seq_lseek"),
    Rule(
        "inode->i_rwsem",
        RWSEM,
        "generic_file_write_iter shmem_file_write_iter ext4_buffered_write_iter ext4_file_write_iter "
        "ext4_file_read_iter blkdev_read_iter blkdev_write_iter fuse_file_write_iter fuse_direct_write_iter "
        "default_llseek ext4_llseek shmem_file_llseek block_llseek blkdev_llseek dcache_dir_lseek "
        "shmem_fallocate do_truncate iterate_dir wrap_directory_iterator path_openat lookup_slow "
        "walk_component lookup_one_unlocked lookup_one_len_unlocked kern_path_locked __kern_path_locked "
        "filename_create do_unlinkat do_rmdir lock_rename lock_rename_child lock_two_directories "
        "lock_two_nondirectories lock_two_inodes start_dirop __start_renaming start_creating "
        "start_creating_dentry start_removing_dentry vfs_link vfs_unlink vfs_rmdir vfs_rename vfs_setxattr "
        "vfs_removexattr vfs_set_acl vfs_remove_acl vfs_utimes vfs_fileattr_set chmod_common chown_common",
    ),
    Rule("dentry->d_lock", SPINLOCK, "__d_lookup d_alloc d_alloc_parallel dget_parent d_walk"),
    Rule("inode->i_lock", SPINLOCK, "__mark_inode_dirty igrab iput"),
    Rule("sb->s_vfs_rename_mutex", MUTEX, "lock_rename lock_rename_child __start_renaming"),
    Rule(
        "sb->s_umount",
        RWSEM,
        "super_lock iterate_supers grab_super get_super __get_super user_get_super deactivate_super "
        "reconfigure_super path_mount path_umount",
    ),
    Rule("ext4_inode->i_data_sem", RWSEM, "ext4_map_blocks ext4_truncate"),
    Rule("ext4_sb->s_orphan_lock", MUTEX, "ext4_orphan_add ext4_orphan_del"),
    Rule(
        "journal->j_checkpoint_mutex",
        MUTEX,
        "__jbd2_log_wait_for_space jbd2_log_do_checkpoint jbd2_update_log_tail jbd2_journal_flush",
    ),
    Rule(
        "kernfs_root->kernfs_rwsem",
        RWSEM,
        "kernfs_iop_lookup kernfs_dop_revalidate kernfs_fop_readdir kernfs_iop_get_link kernfs_activate "
        "kernfs_find_and_get_ns kernfs_walk_and_get_ns kernfs_rename_ns kernfs_show",
    ),
    Rule("kernfs_open_file->mutex", MUTEX, "kernfs_seq_start kernfs_fop_mmap kernfs_fop_llseek"),
    # polling, sockets, terminals, System V IPC
    Rule(
        "eventpoll->mtx",
        MUTEX,
        "do_epoll_ctl do_epoll_ctl_file do_epoll_wait ep_send_events ep_scan_ready_list __ep_eventpoll_poll "
        "ep_loop_check_proc ep_clear_and_put ep_free eventpoll_release_file",
    ),
    Rule(
        "unix_sock->iolock",
        MUTEX,
        "unix_stream_read_generic __unix_dgram_recvmsg unix_dgram_recvmsg unix_read_skb unix_ioctl",
    ),
    Rule("sock->sk_receive_queue.lock", SPINLOCK, "unix_stream_sendmsg unix_stream_read_generic"),
    Rule("unix_sock->bindlock", MUTEX, "unix_bind unix_autobind"),
    Rule(
        "sock->sk_lock.slock",
        SPINLOCK,
        "lock_sock_nested lock_sock_fast __lock_sock_fast __lock_sock release_sock",
    ),
    Rule("tty->atomic_write_lock", MUTEX, "tty_write_lock"),
    Rule("tty->legacy_mutex", MUTEX, "tty_lock tty_lock_interruptible"),
    Rule("tty->termios_rwsem", RWSEM, "n_tty_read n_tty_write n_tty_receive_buf_common tty_set_termios"),
    Rule("n_tty->atomic_read_lock", MUTEX, "n_tty_read"),
    Rule("n_tty->output_lock", MUTEX, "n_tty_write process_echoes commit_echoes n_tty_receive_buf_common"),
    Rule("tty_port->buf.lock", MUTEX, "flush_to_ldisc tty_buffer_flush tty_buffer_lock_exclusive"),
    Rule("ipc_ids->rwsem", RWSEM, "ipcget free_ipcs sysvipc_proc_start shmctl_down"),
    # processes and the scheduler
    Rule("signal->cred_guard_mutex", MUTEX, "bprm_execve ptrace_attach proc_pid_attr_write do_seccomp"),
    Rule(
        "signal->exec_update_lock",
        RWSEM,
        "mm_access do_io_accounting proc_pid_stack proc_pid_syscall proc_pid_personality "
        "futex_get_robust_list_common",
    ),
    Rule("sighand->siglock", SPINLOCK, "__lock_task_sighand lock_task_sighand"),
    Rule("rq->__lock", SPINLOCK, "raw_spin_rq_lock_nested"),
    Rule("timer_base->lock", SPINLOCK, "lock_timer_base"),
    Rule("futex_hash_bucket->lock", SPINLOCK, "futex_q_lock futex_wake"),
    Rule(
        "wait_queue_head->lock",
        SPINLOCK,
        "__wake_up __wake_up_common_lock __wake_up_sync_key prepare_to_wait prepare_to_wait_exclusive "
        "prepare_to_wait_event finish_wait add_wait_queue remove_wait_queue",
    ),
    Rule(
        "kmem_cache_node->list_lock",
        SPINLOCK,
        "get_partial_node get_from_partial_node __slab_free ___slab_alloc free_to_partial_list",
    ),
    Rule("device->mutex", MUTEX, "__driver_attach __device_attach device_release_driver_internal"),
)

_MEMBERS = {
    (lock_type, function): rule.member
    for rule in RULES
    for lock_type in rule.types
    for function in rule.functions.split()
}


def member_of(lock_type: str, function: str) -> str:
    """The Rule.member for a lock of this type that this function takes; empty if RULES has none."""
    return _MEMBERS.get((lock_type, function), "")


def as_table() -> str:
    """RULES as a table in Markdown, for docs/kernel-lock-names.md."""
    rows = ["| lock | type | taken by |", "|---|---|---|"]
    for rule in RULES:
        functions = ", ".join(f"`{function}`" for function in rule.functions.split())
        rows.append(f"| `{rule.member}` | {', '.join(rule.types)} | {functions} |")
    return "\n".join(rows) + "\n"
