"""`python -m train.launch`: see `train.launch.command`."""

from train.launch.command import main

if __name__ == "__main__":
    main()
