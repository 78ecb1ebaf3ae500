"""Object files: programs and libraries, their symbols and tables, and where they are mapped."""
