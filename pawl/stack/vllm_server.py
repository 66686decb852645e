"""Run vLLM's server; `python -m pawl.stack.vllm_server` has the arguments of `vllm serve`."""

from pawl.imports import large_imports


def main() -> None:
    """Import it, which is half of its start, and be it."""
    with large_imports():
        from vllm.entrypoints.launchers.api_server.entry import main as serve
    serve()


if __name__ == "__main__":
    main()
