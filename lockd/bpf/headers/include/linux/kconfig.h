/* Stub: what bcc's own headers ask of a kernel configuration. */
#define CONFIG_BPF_SYSCALL 1
