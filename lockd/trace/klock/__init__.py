"""`lockd trace klock`: how long threads wait for the kernel's locks and hold them."""
