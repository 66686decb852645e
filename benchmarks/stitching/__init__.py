"""`python -m benchmarks.stitching`: are calls without a name joined into their episodes?"""
