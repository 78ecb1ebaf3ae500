"""`lockd trace offcpu` and `offwake`: time off the CPU, by stack and by waker."""
