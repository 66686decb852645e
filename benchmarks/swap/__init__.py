"""Load one adapter after the other into a real vLLM while clients stream: does anybody notice?"""
