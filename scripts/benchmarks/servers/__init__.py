"""What benchmarks/serving.py is made of: contenders, load client, measurements, tables and plots."""
