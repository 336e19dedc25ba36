"""`python -m onebit_launch`: see `onebit_launch.command`."""

from onebit_launch.command import main

if __name__ == "__main__":
    main()
