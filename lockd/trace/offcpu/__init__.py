"""`lockd trace offcpu` and `lockd trace offwake`: time off the CPU, by stack and by waker."""
