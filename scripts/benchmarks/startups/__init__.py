"""What benchmarks/startup.py is made of: the program of each contender, rounds, servers and tables."""
