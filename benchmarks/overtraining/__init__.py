"""Run `python -m benchmarks.overtraining`: does learning go on without undoing what was learned?"""
