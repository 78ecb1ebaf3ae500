"""`lockd trace klock`: waits for the kernel's locks, and how long they are held."""
