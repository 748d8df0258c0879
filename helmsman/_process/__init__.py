"""Linux, for the script and workers: processes and their ends, marks, pulse, ports, safe files."""
