"""`python -m benchmarks.on_gpu`: see `benchmarks.on_gpu.command`."""

from benchmarks.on_gpu.command import main

if __name__ == "__main__":
    main()
