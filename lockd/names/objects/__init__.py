"""Object files: programs and libraries, their symbols and unwinding rules, and where processes map them."""
