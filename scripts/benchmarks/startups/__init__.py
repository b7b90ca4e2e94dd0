"""The parts of benchmarks/startup.py: the program of each contender, rounds, servers and tables."""
