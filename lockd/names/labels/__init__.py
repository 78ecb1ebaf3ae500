"""Labels: units and names of processes, and the reasons why threads are off the CPU."""
