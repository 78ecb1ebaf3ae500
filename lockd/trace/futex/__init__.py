"""`lockd trace futex` and `lockd trace report`: waits for locks in user space."""
